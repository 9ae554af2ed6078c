"""The weights and the KV memory of several ranks, with the methods that a single rank's have."""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor

from graftlm.assembly.served_weights import NewWeights, ServedWeights
from graftlm.errors import AdapterError, UnsupportedFeatureError
from graftlm.execution.graphs import HeldGraphs
from graftlm.layers.low_rank import LowRankFactors
from graftlm.lora.adapters import AdapterCatalog
from graftlm.lora.peft_adapter import AdapterWeights
from graftlm.parallel.rank_group import RankGroup

__all__ = ["RankAdapterParts", "RankAdapters", "RankKV", "RankWeights"]

#: Deadline in seconds of operations that read or write all weights.
_WEIGHTS_TIMEOUT_S = 3600.0


class RankAdapters:
    """The slots of adapters on all ranks; each rank stores its part of an adapter."""

    def __init__(self, group: RankGroup) -> None:
        self._group = group

    def set(self, slot: int, factors: Mapping[str, LowRankFactors]) -> None:
        """Store an adapter in a slot.

        Raises:
            AdapterError: a rank refuses the factors; the slot is then empty on all ranks.
        """
        tensors = {f"{name}.{part}": getattr(pair, part) for name, pair in factors.items() for part in ("down", "up")}
        try:
            self._group.request("set_adapter", {"slot": slot, "factors": save(tensors)})
        except AdapterError:
            self.clear({slot})
            raise

    def clear(self, slots: Collection[int]) -> None:
        """Clear slots."""
        self._group.request("clear_adapters", {"slots": list(slots)})


@dataclass(frozen=True, slots=True)
class RankAdapterParts:
    """The parts for adapters on the scheduler's side; see `AdapterParts`."""

    catalog: AdapterCatalog
    layers: RankAdapters
    read: Callable[[Path], AdapterWeights]


class RankKV:
    """The KV memory of all ranks.

    Attributes:
        dtype: dtype of the stored keys and values.
    """

    def __init__(self, group: RankGroup, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._group = group
        self._is_released = False

    @property
    def is_released(self) -> bool:
        """Whether the memory is released."""
        return self._is_released

    def release(self) -> None:
        """Release the memory on all ranks."""
        self._group.request("release_kv", {})
        self._is_released = True

    def restore(self) -> bool:
        """Allocate the memory again on all ranks. Return False, because each rank captures its graphs again."""
        self._group.request("restore_kv", {})
        self._is_released = False
        return False


class RankWeights:
    """The weights of all ranks; see `ServedWeights`.

    Args:
        checks: checks new weights against the whole model, which has no memory.
    """

    def __init__(self, group: RankGroup, checks: ServedWeights) -> None:
        self._group = group
        self._checks = checks
        self._is_released = False
        self._lacking: str | None = None
        self.graphs = HeldGraphs()

    @property
    def is_released(self) -> bool:
        """Whether the weights have no memory."""
        return self._is_released

    @property
    def lacking(self) -> str | None:
        """The reason why no step can run; None if no weight is missing."""
        return self._lacking

    def checked(self, weights: str | Path | Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]) -> NewWeights:
        """Check the weights of a checkpoint, or tensors. Raises: see `ServedWeights`."""
        return self._checks.checked(weights)

    def replace(self, new: NewWeights) -> None:
        """Copy each rank's parts of checked weights. Raises: see `ServedWeights.replace`."""
        if new.path is not None:
            arguments: dict[str, Any] = {"path": str(new.path)}
        else:
            tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in (new.tensors or {}).items()}
            arguments = {"tensors": save(tensors)}
        self._request("replace_weights", arguments)

    def read(self, name: str) -> Tensor:
        """Return a copy of a weight. Raises: see `ServedWeights.read`."""
        data: bytes = self._group.request("read_weight", {"name": name}, _WEIGHTS_TIMEOUT_S)[0]
        return load(data)["weight"]

    def drop(self) -> None:
        """Consider all weights missing until new ones were loaded."""
        self._request("drop_weights", {})

    def check_release(self) -> None:
        """Check that the weights can be released and restored. Raises: see `ServedWeights.check_release`."""
        self._request("check_release", {})

    def release(self, *, keep: bool) -> None:
        """Release the memory of the weights; see `ServedWeights.release`."""
        self._request("release_weights", {"keep": keep})

    def resume(self) -> None:
        """Allocate the memory of the weights, and restore them; see `ServedWeights.resume`."""
        self._request("resume_weights", {})

    def fingerprint(self) -> bytes:
        """Refuse, because lower tiers of caches are not split over ranks."""
        raise UnsupportedFeatureError("caches with lower tiers are not supported with several ranks")

    def _request(self, operation: str, arguments: Mapping[str, Any]) -> None:
        self._is_released, self._lacking = self._group.request(operation, arguments, _WEIGHTS_TIMEOUT_S)[0]
