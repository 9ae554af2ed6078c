"""Loads and unloads adapters in a running engine, between two steps."""

import logging
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Protocol

from graftlm.layers.low_rank import LowRankFactors
from graftlm.lora.adapters import AdapterCatalog, LoadedAdapter
from graftlm.lora.peft_adapter import AdapterWeights
from graftlm.step_loop import StepLoop

__all__ = ["AdapterLoader", "AdapterSlots"]

_logger = logging.getLogger(__name__)


class AdapterSlots(Protocol):
    """The slots of adapters on the device; see `AdapterLayers`."""

    def set(self, slot: int, factors: Mapping[str, LowRankFactors]) -> None:
        """Store an adapter in a slot."""
        ...

    def clear(self, slots: Collection[int]) -> None:
        """Clear slots."""
        ...


class AdapterLoader:
    """Reads adapters in any thread, and installs them in the thread of the step loop.

    Args:
        loop: the engine's step loop.
        catalog: the adapters by name.
        layers: the layers that store the adapters' weights.
        read: function that reads the adapter in a folder; raises AdapterError if it does not fit the model.
    """

    def __init__(
        self,
        loop: StepLoop,
        catalog: AdapterCatalog,
        layers: AdapterSlots,
        read: Callable[[Path], AdapterWeights],
    ) -> None:
        self._loop = loop
        self._catalog = catalog
        self._layers = layers
        self._read = read
        self._unloaded_slots: set[int] = set()  # slots of unloaded adapters whose weights are not cleared yet

    @property
    def loaded(self) -> Mapping[str, LoadedAdapter]:
        """The adapters that new requests may use, by name. May be read in any thread."""
        return self._catalog.loaded

    def read(self, name: str, path: str) -> AdapterWeights:
        """Read an adapter and check that it fits the model. The method has no effects; any thread may call it.

        Args:
            name: the name that the adapter will have.
            path: the adapter's folder.

        Raises:
            AdapterError: the adapter does not fit, or the name is in use.
        """
        self._catalog.check_new(name)
        return self._read(Path(path))

    def install(self, name: str, path: str, weights: AdapterWeights) -> LoadedAdapter:
        """Copy an adapter to the device between two steps, and accept requests for it.

        Raises:
            AdapterError: the name is in use, or all slots are in use.
        """
        self._catalog.check_new(name)
        self._clear_unused()
        slot = self._catalog.free_slot(self._loop.scheduler.used_adapter_slots)
        start_s = time.monotonic()
        self._loop.run_on_device(lambda: self._layers.set(slot, weights.factors))
        adapter = LoadedAdapter(name, path, slot, weights.digest)
        self._catalog.add(adapter)
        delay_ms = (time.monotonic() - start_s) * 1e3
        _logger.info("adapter %s of %s is loaded; steps waited %.1f ms", name, path, delay_ms)
        return adapter

    def unload(self, name: str) -> int:
        """Refuse new requests for an adapter. Waiting and running requests use it until they end.

        Returns: the number of waiting and running requests with the adapter.

        Raises:
            AdapterNotFoundError: no adapter has that name.
        """
        adapter = self._catalog.remove(name)
        self._unloaded_slots.add(adapter.slot)
        num_left = self._loop.scheduler.used_adapter_slots[adapter.slot]
        _logger.info("adapter %s of %s is unloaded; %d requests still use it", name, adapter.path, num_left)
        self._clear_unused()
        return num_left

    def _clear_unused(self) -> None:
        """Clear the slots of unloaded adapters whose last request has ended."""
        used = self._loop.scheduler.used_adapter_slots
        unused = {slot for slot in self._unloaded_slots if not used[slot]}
        if unused:
            self._loop.run_on_device(lambda: self._layers.clear(unused))
            self._unloaded_slots -= unused
