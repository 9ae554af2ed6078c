"""The attention function that Transformers' modules call, and the trial run that records its arguments.

Transformers looks up attention functions by name. A module that uses this look-up passes queries, keys and values to
the function, and does not depend on how keys and values are stored. This module registers one function under two names.
Under `PROBE`, a model also requests masks and receives descriptions of them. Under `PAGED`, it builds no masks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from graftlm.contracts import AttentionBackend, AttentionLayer
from graftlm.errors import InvariantError, UnsupportedArchitectureError
from graftlm.layers import Attention

__all__ = ["PAGED", "PROBE", "AttentionCalls", "register_attention", "try_attention"]

#: Names of attention implementations in Transformers.
PAGED, PROBE = "graftlm_paged", "graftlm_probe"

#: Name of an attribute of attention modules. The function passes a module's calls to the attribute's value.
_CALLS = "graftlm_calls"

#: Arguments of attention functions that do not affect masks, or that are read below.
_KNOWN_ARGUMENTS = frozenset(
    {
        "dropout",
        "is_causal",
        "output_attentions",
        "position_ids",
        "s_aux",
        "scaling",
        "sliding_window",
        "softcap",
        "use_cache",
    }
)

_NUM_PROBE_TOKENS = 5
_TAINTED_TOKEN = 2


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, **arguments: Any
) -> tuple[Tensor, None]:
    """Compute attention with Transformers' arguments.

    Args:
        module: the attention module.
        query: [1, H, T, D].
        key: [1, H_kv, T, D].
        value: [1, H_kv, T, D_v].
        attention_mask: result of `_describe_mask`; None under `PAGED`.
        arguments: other arguments of the module.

    Returns: [1, T, H, D_v], and None in place of the weights.

    Raises:
        InvariantError: the module did not attend in the trial run.
    """
    calls: AttentionCalls | _Recorder | None = getattr(module, _CALLS, None)
    if calls is None:
        raise InvariantError(f"{type(module).__name__} called attention, but did not call it in the trial run")
    return calls.attend(module, query, key, value, attention_mask, arguments), None


class AttentionCalls:
    """The attention calls of a model's forward pass, computed over pages. Each call has a layer of the KV cache.

    Args:
        layers: the attention layer of each call.
        trials: the recorded call of each layer, in the order of `layers`.
    """

    def __init__(self, layers: Sequence[AttentionLayer], trials: Sequence[_Call]) -> None:
        self.layers = tuple(layers)
        self._attentions = [Attention(layer) for layer in layers]
        self._modules = [trial.module for trial in trials]
        self._value_dims = [trial.value_dim for trial in trials]
        self._next = 0

    def bind(self, backend: AttentionBackend) -> None:
        """Set the attention backend of all calls."""
        for attention in self._attentions:
            attention.bind(backend)

    def restart(self) -> None:
        """Start a new forward pass."""
        self._next = 0

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: object, arguments: object
    ) -> Tensor:
        """Compute attention over pages. Mask and arguments are ignored, because they equal those of the trial run.

        Keys and values of different widths are padded with zeros to the larger width. This changes neither scores nor
        sums.

        Raises:
            InvariantError: the call is out of order.
        """
        turn, self._next = self._next, self._next + 1
        if turn == len(self._modules) or self._modules[turn] is not module:
            raise InvariantError(
                f"Attention call {turn}, of {type(module).__name__}, is not in the order of the trial run"
            )
        head_dim, num_tokens = self.layers[turn].head_dim, query.shape[2]
        mixed: Tensor = self._attentions[turn](*(_by_token(tensor, head_dim) for tensor in (query, key, value)))
        return mixed.view(1, num_tokens, -1, head_dim)[..., : self._value_dims[turn]]


def _by_token(tensor: Tensor, head_dim: int) -> Tensor:
    """Map [1, heads, T, width] to [T, heads, head_dim]."""
    missing = head_dim - tensor.shape[-1]
    if missing:
        tensor = nn.functional.pad(tensor, (0, missing))
    elif tensor.stride(-1) != 1:
        tensor = tensor.contiguous()
    return tensor[0].transpose(0, 1)


def try_attention(body: nn.Module, max_len: int, device: torch.device) -> tuple[AttentionCalls, Tensor]:
    """Run a model on a few tokens, record its attention calls, and redirect them to pages afterwards.

    One token's embedding is NaN in that run, and attention returns zeros. If the hidden state of any other token is
    NaN, information passed between tokens in another way than attention, such as a convolution or a recurrent state.
    Pages of keys and values cannot carry this information from one step to the next.

    Args:
        body: body of a model whose attention implementation is `PROBE`; its parameters are finite.
        max_len: the longest context in tokens; masks are compared up to this length.
        device: the model's device.

    Returns: the calls, and the hidden states of the run, [5, hidden].

    Effects: sets an attribute of each attention module, which the attention function reads.

    Raises:
        UnsupportedArchitectureError: the model cannot be served over pages; the message has the reason.
    """
    recorder = _Recorder()
    for module in body.modules():
        setattr(module, _CALLS, recorder)
    try:
        hidden = _run_tainted(body, device)
    except Exception as error:
        raise UnsupportedArchitectureError(
            f"A trial run of {type(body).__name__} with paged attention failed. This happens if a model computes with "
            f"masks, or needs its own cache: {type(error).__name__}: {error}"
        ) from error
    finally:
        for module in body.modules():
            delattr(module, _CALLS)
    _check_mixing(type(body).__name__, recorder.calls, hidden)
    calls = AttentionCalls([call.layer(i, max_len) for i, call in enumerate(recorder.calls)], recorder.calls)
    for call in recorder.calls:
        setattr(call.module, _CALLS, calls)
    return calls, hidden


def _run_tainted(body: Any, device: torch.device) -> Tensor:
    """Return the hidden states of five tokens, [5, hidden]; one token's embedding is NaN."""
    handle = body.get_input_embeddings().register_forward_hook(_taint)
    tokens = torch.zeros(1, _NUM_PROBE_TOKENS, dtype=torch.int64, device=device)
    positions = torch.arange(_NUM_PROBE_TOKENS, device=device)[None]
    try:
        with torch.no_grad():
            hidden: Tensor = body(input_ids=tokens, position_ids=positions, use_cache=False)[0]
    finally:
        handle.remove()
    return hidden[0]


def _taint(module: nn.Module, inputs: object, embedded: Tensor) -> Tensor:
    tainted = embedded.clone()
    tainted[:, _TAINTED_TOKEN] = torch.nan
    return tainted


def _check_mixing(name: str, calls: Sequence[_Call], hidden: Tensor) -> None:
    if not calls:
        raise UnsupportedArchitectureError(
            f"{name} does not call the given attention function: it has its own implementation of attention, or a "
            f"substitute, whose state cannot be paged"
        )
    reached = hidden.isnan().any(dim=-1).tolist()
    if any(is_reached for token, is_reached in enumerate(reached) if token != _TAINTED_TOKEN):
        raise UnsupportedArchitectureError(
            f"{name} passes information between tokens in other ways than attention, such as a convolution, linear "
            f"attention or a recurrent state; only attention over keys and values can be paged"
        )


@dataclass(frozen=True, slots=True)
class _Mask:
    """Describes a mask in a trial run by the positions that each position attends to.

    Attributes:
        sees: function (query positions, key positions) -> bool tensor of their broadcast shape.
    """

    sees: Callable[[Tensor, Tensor], Tensor]

    def window(self, max_len: int) -> int | None:
        """Return the sliding window of the mask, in tokens; None: the mask is causal without a window.

        Raises:
            UnsupportedArchitectureError: the mask is neither causal nor a sliding window.
        """
        rows = sorted({min(row, max_len - 1) for row in (0, 1, 2, 3, 17, 101, max_len // 3, max_len // 2, max_len)})
        queries, keys = torch.tensor(rows)[:, None], torch.arange(max_len)[None]
        seen = self.sees(queries, keys).expand(len(rows), max_len)
        window = int(seen[-1].sum())
        if not torch.equal(seen, (keys <= queries) & (keys > queries - window)):
            raise UnsupportedArchitectureError(
                "A layer's mask is neither causal nor a sliding window; chunked and bidirectional attention are not "
                "supported"
            )
        return None if window == max_len else window


def _describe_mask(*, mask_function: Callable[..., Any], **rest: Any) -> _Mask:
    """Return a description of a mask instead of the mask; called by Transformers."""
    zero = torch.tensor(0)

    def sees(queries: Tensor, keys: Tensor) -> Tensor:
        seen = mask_function(zero, zero, queries, keys)
        return torch.as_tensor(seen).to(device="cpu", dtype=torch.bool)

    return _Mask(sees)


@dataclass(frozen=True, slots=True)
class _Call:
    """The arguments of one attention call of a trial run.

    Attributes:
        module: the attention module.
        num_heads, num_kv_heads: H and H_kv.
        key_dim, value_dim: D and D_v.
        mask: the mask that the module passed: the result of `_describe_mask`, None, or a tensor of the module itself.
        arguments: the other arguments by name.
    """

    module: nn.Module
    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    mask: object
    arguments: dict[str, Any]

    def layer(self, layer_id: int, max_len: int) -> AttentionLayer:
        """Return the attention layer of the call.

        Args:
            layer_id: index of the call.
            max_len: the longest context in tokens.

        Raises:
            UnsupportedArchitectureError: paged attention does not support an argument.
        """
        given = {name: value for name, value in self.arguments.items() if value is not None}
        name = type(self.module).__name__
        unknown = sorted(given.keys() - _KNOWN_ARGUMENTS)
        if unknown:
            raise UnsupportedArchitectureError(
                f"{name} passes the argument {unknown[0]!r} to attention, which paged attention does not support"
            )
        if not isinstance(self.mask, _Mask):
            mask = "no mask" if self.mask is None else f"its own mask, a {type(self.mask).__name__},"
            raise UnsupportedArchitectureError(
                f"{name} passes {mask} to attention, so it is unknown which tokens attend to which"
            )
        sinks = given.get("s_aux")
        if sinks is not None and not (isinstance(sinks, nn.Parameter) and sinks.shape == (self.num_heads,)):
            raise UnsupportedArchitectureError(
                f"{name} passes attention sinks that are not a parameter with one number per head"
            )
        return AttentionLayer(
            layer_id=layer_id,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=max(self.key_dim, self.value_dim),
            scale=float(given.get("scaling", self.key_dim**-0.5)),
            sliding_window=self.mask.window(max_len),
            soft_cap=None if "softcap" not in given else float(given["softcap"]),
            sinks=sinks,
        )


class _Recorder:
    """Records the attention calls of a trial run in order, and returns zeros."""

    def __init__(self) -> None:
        self.calls: list[_Call] = []

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: object, arguments: dict[str, Any]
    ) -> Tensor:
        """Record a call, and return zeros, [1, T, H, D_v]."""
        num_heads, key_dim, value_dim = query.shape[1], query.shape[3], value.shape[3]
        self.calls.append(_Call(module, num_heads, key.shape[1], key_dim, value_dim, mask, arguments))
        return query.new_zeros(1, query.shape[2], num_heads, value_dim)


def register_attention() -> None:
    """Register both names with Transformers. Repeated calls are allowed."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(PAGED, _attend)
    AttentionInterface.register(PROBE, _attend)
    AttentionMaskInterface.register(PROBE, _describe_mask)
