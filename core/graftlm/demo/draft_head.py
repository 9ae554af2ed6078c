"""The EAGLE-3 head of the demo model in the form in which it is trained: all positions and several drafted tokens."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaForCausalLM

__all__ = ["HIDDEN_LAYERS", "DraftHeadNet", "HeadSizes", "hidden_inputs"]

HIDDEN_LAYERS: Final = (1, 3, 5)
"""Layers of the demo model whose inputs the head reads; 5 is the output of the last layer."""


@dataclass(frozen=True, slots=True)
class HeadSizes:
    """The sizes of the head."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    draft_vocab_size: int
    rope_theta: float
    eps: float


class DraftHeadNet(nn.Module):
    """The head, whose parameters have the names of published heads.

    Attributes:
        sizes: the sizes with which it was created.
    """

    def __init__(self, sizes: HeadSizes) -> None:
        super().__init__()
        hidden = sizes.hidden_size
        self.sizes = sizes
        self.fc = nn.Linear(len(HIDDEN_LAYERS) * hidden, hidden, bias=False)
        self.midlayer = _Layer(sizes)
        self.norm = _Norm(hidden, sizes.eps)
        self.lm_head = nn.Linear(hidden, sizes.draft_vocab_size, bias=False)

    def steps(self, inputs: Tensor, embedded: Tensor, num_steps: int) -> Iterator[Tensor]:
        """Yield the logits of each drafted token at all positions, [B, T, draft vocabulary].

        In step j, position p reads the head's output of step j - 1 at p - 1, and the token at p + 1. It attends to the
        keys of step 0 up to p - j, and to those of its own chain:

            step 2 at position p attends to     step 0: 0 ... p - 2     step 1: p - 1     step 2: p

        The first j positions of step j have no meaning.

        Args:
            inputs: hidden states of the served model, [B, T, 3 hidden].
            embedded: embedding of the token after each position, [B, T, hidden].
        """
        features = self.fc(inputs)
        chain: list[tuple[Tensor, Tensor]] = []
        for _ in range(num_steps):
            out = self.midlayer(features, embedded, chain)
            yield self.lm_head(self.norm(out))
            features = out.roll(1, dims=1)


class _Norm(nn.RMSNorm):
    """A norm in the dtype of its weight, whatever dtype autocast has given the input."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype))


class _Layer(nn.Module):
    """The decoder layer."""

    def __init__(self, sizes: HeadSizes) -> None:
        super().__init__()
        hidden = sizes.hidden_size
        self.input_layernorm = _Norm(hidden, sizes.eps)
        self.hidden_norm = _Norm(hidden, sizes.eps)
        self.self_attn = _Attention(sizes)
        self.post_attention_layernorm = _Norm(hidden, sizes.eps)
        self.mlp = _MLP(sizes)

    def forward(self, features: Tensor, embedded: Tensor, chain: list[tuple[Tensor, Tensor]]) -> Tensor:
        x = torch.cat([self.input_layernorm(embedded), self.hidden_norm(features)], dim=-1)
        x = features + self.self_attn(x, chain)
        added: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return added


class _Attention(nn.Module):
    """Attention over the keys of step 0, and over one key of each later step."""

    def __init__(self, sizes: HeadSizes) -> None:
        super().__init__()
        self._sizes = sizes
        self.q_proj = nn.Linear(2 * sizes.hidden_size, sizes.num_heads * sizes.head_dim, bias=False)
        self.k_proj = nn.Linear(2 * sizes.hidden_size, sizes.num_kv_heads * sizes.head_dim, bias=False)
        self.v_proj = nn.Linear(2 * sizes.hidden_size, sizes.num_kv_heads * sizes.head_dim, bias=False)
        self.o_proj = nn.Linear(sizes.num_heads * sizes.head_dim, sizes.hidden_size, bias=False)

    def forward(self, x: Tensor, chain: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Attend, and append the keys and values, [B, H, T, D], to `chain`."""
        sizes, step = self._sizes, len(chain)
        q, k, v = (self._heads(project(x)) for project in (self.q_proj, self.k_proj, self.v_proj))
        q, k = _rotate(q, sizes.rope_theta), _rotate(k, sizes.rope_theta)
        repeats = sizes.num_heads // sizes.num_kv_heads
        chain.append((k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)))
        (first_k, first_v), *later = chain
        count = x.shape[1]
        visible = torch.ones(count, count, dtype=torch.bool).tril(-step)
        scores = [(q @ first_k.transpose(-1, -2)).masked_fill(~visible, -torch.inf)]
        scores += [(q * key.roll(step - i, 2)).sum(-1, keepdim=True) for i, (key, _) in enumerate(later, start=1)]
        weights = torch.softmax(torch.cat(scores, dim=-1).float() * sizes.head_dim**-0.5, dim=-1).to(first_v.dtype)
        mixed = weights[..., :count] @ first_v
        for i, (_, value) in enumerate(later, start=1):
            mixed = mixed + weights[..., count + i - 1 : count + i] * value.roll(step - i, 2)
        out: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return out

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], -1, self._sizes.head_dim).transpose(1, 2)


class _MLP(nn.Module):
    """The gated feed-forward."""

    def __init__(self, sizes: HeadSizes) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(sizes.hidden_size, sizes.intermediate_size, bias=False)
        self.up_proj = nn.Linear(sizes.hidden_size, sizes.intermediate_size, bias=False)
        self.down_proj = nn.Linear(sizes.intermediate_size, sizes.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


def hidden_inputs(model: LlamaForCausalLM, input_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return the inputs of `HIDDEN_LAYERS` side by side, [B, T, 3 hidden], and the final hidden states."""
    found: dict[int, Tensor] = {}
    modules = [*model.model.layers, model.model.norm]

    def store(i: int, x: Tensor) -> None:
        found[i] = x

    hooks = [
        modules[i].register_forward_pre_hook(lambda module, arguments, i=i: store(i, arguments[0]))
        for i in HIDDEN_LAYERS
    ]
    try:
        final = model.model(input_ids=input_ids).last_hidden_state
    finally:
        for hook in hooks:
            hook.remove()
    return torch.cat([found[i] for i in HIDDEN_LAYERS], dim=-1), final


def _rotate(x: Tensor, theta: float) -> Tensor:
    """Rotate [B, H, T, D] by positions 0 to T - 1."""
    half = x.shape[-1] // 2
    angles = torch.arange(x.shape[2])[:, None] / theta ** (torch.arange(half) / half)
    cos, sin = angles.cos(), angles.sin()
    first, second = x[..., :half].float(), x[..., half:].float()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)
