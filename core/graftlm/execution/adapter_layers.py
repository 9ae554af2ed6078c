"""The linear layers of a model that take low-rank adapters, and what each step tells them."""

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
    """Return a loaded model's linear layers that adapters may change: those that see every token of a batch.

    Layers at the top of the checkpoint, such as `lm_head`, see the tokens that are sampled from, and are left out.
    """
    return [module for module in model.modules() if isinstance(module, Linear) and module.prefix]


class AdapterLayers:
    """Holds the factors of every adapter on the device, and routes each token of a step to its own.

    Steps without adapters cost one look at the plan. The methods are called where steps run, between two of them.

    Args:
        layers: those that take adapters.
        num_slots: adapters at most.
        max_rank: of an adapter.
    """

    def __init__(self, layers: Collection[Linear], num_slots: int, max_rank: int) -> None:
        self._num_slots = num_slots
        self._layers = [(layer, LowRankLayer(layer, num_slots, max_rank)) for layer in layers]
        self._is_routing = False

    @property
    def dtype(self) -> torch.dtype:
        """What factors are kept in: the dtype of the layers, of which there is one or more."""
        return self._layers[0][0].weight.dtype

    @property
    def num_bytes(self) -> int:
        """Memory of the factors, whether adapters are loaded or not."""
        return sum(factors.num_bytes for _, factors in self._layers)

    @torch.inference_mode()
    def set(self, slot: int, factors: Mapping[str, LowRankFactors]) -> None:
        """Put an adapter into a slot.

        Args:
            factors: by the projection's name in the checkpoint, such as "model.layers.0.self_attn.q_proj".

        Raises:
            AdapterError: a factor is not finite in the layers' dtype; the slot is empty.
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
        """Empty slots."""
        for _, low_rank in self._layers:
            for slot in slots:
                low_rank.clear(slot)

    def route(self, plan: StepPlan) -> None:
        """Have the layers add each token's adapter in the step that comes now."""
        if plan.adapter_slots is None:
            if self._is_routing:
                self._tell(None)
            return
        device = self._layers[0][0].weight.device
        self._tell(route_of(plan.adapter_slots, plan.query_lens, self._num_slots, device))

    def _tell(self, route: AdapterRoute | None) -> None:
        self._is_routing = route is not None
        for _, low_rank in self._layers:
            low_rank.route(route)


def route_of(
    adapter_slots: NDArray[np.int32],
    query_lens: NDArray[np.int32],
    num_slots: int,
    device: torch.device,
) -> AdapterRoute:
    """Return which adapter each token has, in the form that suits the device.

    Args:
        adapter_slots: int32 [B], 0 for requests without one.
        query_lens: int32 [B].
    """
    of_token = np.repeat(adapter_slots, query_lens)
    if device.type != "cpu":
        mask = of_token[:, None] == np.arange(1, num_slots + 1)
        return AdapterMask(to_device(mask, device))
    return _groups(of_token)


def _groups(of_token: NDArray[np.int32]) -> AdapterGroups:
    """Group tokens by their adapter's slot, int32 [T]; they are moved only if an adapter's are not in one piece."""
    pieces = _pieces(of_token)
    if len({slot for slot, _ in pieces}) == len(pieces):
        return AdapterGroups(len(of_token), pieces)
    order = of_token.argsort(kind="stable")
    inverse = torch.from_numpy(order.argsort())
    return AdapterGroups(len(of_token), _pieces(of_token[order]), torch.from_numpy(order), inverse)


def _pieces(of_token: NDArray[np.int32]) -> tuple[tuple[int, slice], ...]:
    """Return (slot, tokens) of each run of tokens with the same adapter."""
    starts = np.flatnonzero(np.diff(of_token, prepend=-1)).tolist()
    ends = [*starts[1:], len(of_token)]
    runs = [(int(of_token[start]), slice(start, end)) for start, end in zip(starts, ends, strict=True)]
    return tuple([(slot, tokens) for slot, tokens in runs if slot != BASE_SLOT])
