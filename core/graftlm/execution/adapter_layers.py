"""Stores adapters in a model's linear layers, and sets the adapter of each token of a step."""

from collections.abc import Collection, Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from graftlm.execution.batch import to_device
from graftlm.layers import Linear
from graftlm.layers.low_rank import AdapterGroups, AdapterMask, AdapterRoute, LowRankFactors, LowRankLayer
from graftlm.lora.adapters import BASE_SLOT
from graftlm.plan import StepPlan

__all__ = ["AdapterLayers", "adaptable_layers", "route_of"]


def adaptable_layers(model: nn.Module) -> list[Linear]:
    """Return a loaded model's linear layers that can have adapters. These layers compute every token of a batch.

    Layers at the checkpoint's top level, such as `lm_head`, compute only the sampled tokens and are excluded.
    """
    return [module for module in model.modules() if isinstance(module, Linear) and module.prefix]


class AdapterLayers:
    """Stores the factors of all adapters on the device, and sets the adapter of each token of a step.

    A step without adapters costs one check of the plan. The methods are called in the step thread, between two steps.

    Args:
        layers: the layers that can have adapters.
        num_slots: maximum number of adapters.
        max_rank: maximum rank of an adapter.
    """

    def __init__(self, layers: Collection[Linear], num_slots: int, max_rank: int) -> None:
        self._num_slots = num_slots
        self._layers = [(layer, LowRankLayer(layer, num_slots, max_rank)) for layer in layers]
        self._is_routing = False

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the factors, which is the layers' dtype. There must be at least one layer."""
        return self._layers[0][0].weight.dtype

    @property
    def num_bytes(self) -> int:
        """Size of the factors in bytes, which does not depend on the loaded adapters."""
        return sum(factors.num_bytes for _, factors in self._layers)

    @torch.inference_mode()
    def set(self, slot: int, factors: Mapping[str, LowRankFactors]) -> None:
        """Store an adapter in a slot.

        Args:
            factors: name of the projection in the checkpoint, such as "model.layers.0.self_attn.q_proj" -> its factors.

        Raises:
            AdapterError: a factor is not finite in the layers' dtype; the slot is then empty.
        """
        try:
            for layer, low_rank in self._layers:
                low_rank.set(
                    slot, {name: factors[key] for name in layer.parts if (key := f"{layer.prefix}{name}") in factors}
                )
        except Exception:
            self.clear({slot})
            raise

    @torch.inference_mode()
    def clear(self, slots: Collection[int]) -> None:
        """Clear slots."""
        for _, low_rank in self._layers:
            for slot in slots:
                low_rank.clear(slot)

    def route(self, plan: StepPlan) -> None:
        """Set each token's adapter for the next step."""
        if plan.adapter_slots is None:
            if self._is_routing:
                self._set_route(None)
            return
        device = self._layers[0][0].weight.device
        self._set_route(route_of(plan.adapter_slots, plan.query_lens, self._num_slots, device))

    def _set_route(self, route: AdapterRoute | None) -> None:
        self._is_routing = route is not None
        for _, low_rank in self._layers:
            low_rank.route(route)


def route_of(
    adapter_slots: NDArray[np.int32],
    query_lens: NDArray[np.int32],
    num_slots: int,
    device: torch.device,
) -> AdapterRoute:
    """Return the adapter of each token: on a GPU as a mask, on a CPU as groups of tokens.

    Args:
        adapter_slots: int32 [B], the adapter slot of each request; 0 without an adapter.
        query_lens: int32 [B], number of tokens of each request.
    """
    of_token = np.repeat(adapter_slots, query_lens)
    if device.type != "cpu":
        mask = of_token[:, None] == np.arange(1, num_slots + 1)
        return AdapterMask(to_device(mask, device))
    return _groups(of_token)


def _groups(of_token: NDArray[np.int32]) -> AdapterGroups:
    """Group tokens by adapter slot, int32 [T]. Tokens are reordered only if an adapter's tokens are not contiguous."""
    pieces = _pieces(of_token)
    if len({slot for slot, _ in pieces}) == len(pieces):
        return AdapterGroups(len(of_token), pieces)
    order = of_token.argsort(kind="stable")
    inverse = torch.from_numpy(order.argsort())
    return AdapterGroups(len(of_token), _pieces(of_token[order]), torch.from_numpy(order), inverse)


def _pieces(of_token: NDArray[np.int32]) -> tuple[tuple[int, slice], ...]:
    """Return (slot, tokens) of each contiguous run of tokens with the same adapter. Tokens without one are left out."""
    starts = np.flatnonzero(np.diff(of_token, prepend=-1)).tolist()
    ends = [*starts[1:], len(of_token)]
    runs = [(int(of_token[start]), slice(start, end)) for start, end in zip(starts, ends, strict=True)]
    return tuple([(slot, tokens) for slot, tokens in runs if slot != BASE_SLOT])
