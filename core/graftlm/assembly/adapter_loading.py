"""Loads adapters into a running engine, and unloads them, between two steps."""

import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from graftlm.execution.adapter_layers import AdapterLayers
from graftlm.lora.adapters import AdapterCatalog, LoadedAdapter
from graftlm.lora.peft_adapter import AdapterWeights
from graftlm.step_loop import StepLoop

__all__ = ["AdapterLoader"]

_logger = logging.getLogger(__name__)


class AdapterLoader:
    """Reads adapters in any thread, and installs them in the thread of the step loop.

    Args:
        loop: whose requests have the adapters.
        catalog: finds them by name.
        layers: hold them.
        read: from a folder to an adapter that fits the model; raises AdapterError.
    """

    def __init__(
        self,
        loop: StepLoop,
        catalog: AdapterCatalog,
        layers: AdapterLayers,
        read: Callable[[Path], AdapterWeights],
    ) -> None:
        self._loop = loop
        self._catalog = catalog
        self._layers = layers
        self._read = read
        self._leaving: set[int] = set()  # slots of unloaded adapters that are not cleared yet

    @property
    def loaded(self) -> Mapping[str, LoadedAdapter]:
        """The adapters that take requests, by name. From any thread."""
        return self._catalog.loaded

    def read(self, name: str, path: str) -> AdapterWeights:
        """Read an adapter that is to have a name, and check that it fits the model. From any thread; changes nothing.

        Raises:
            AdapterError: it does not fit, or the name is taken.
        """
        self._catalog.check_new(name)
        return self._read(Path(path))

    def install(self, name: str, path: str, weights: AdapterWeights) -> LoadedAdapter:
        """Copy an adapter to the device, after the steps under way, and let requests have it.

        Raises:
            AdapterError: the name or every slot is taken.
        """
        self._catalog.check_new(name)
        self._clear_left()
        slot = self._catalog.free_slot(self._loop.scheduler.used_adapter_slots)
        start_s = time.monotonic()
        self._loop.run_on_device(lambda: self._layers.set(slot, weights.factors))
        adapter = LoadedAdapter(name, path, slot, weights.digest)
        self._catalog.add(adapter)
        held_ms = (time.monotonic() - start_s) * 1e3
        _logger.info("adapter %s of %s is loaded; steps waited %.1f ms", name, path, held_ms)
        return adapter

    def unload(self, name: str) -> int:
        """Take no more requests for an adapter; returns how many it still has, which end as if nothing had happened.

        Raises:
            AdapterNotFoundError: no adapter has that name.
        """
        adapter = self._catalog.remove(name)
        self._leaving.add(adapter.slot)
        num_left = self._loop.scheduler.used_adapter_slots[adapter.slot]
        _logger.info("adapter %s of %s is unloaded; %d requests go on with it", name, adapter.path, num_left)
        self._clear_left()
        return num_left

    def _clear_left(self) -> None:
        """Empty the slots of unloaded adapters whose last request has ended."""
        used = self._loop.scheduler.used_adapter_slots
        left = {slot for slot in self._leaving if not used[slot]}
        if left:
            self._loop.run_on_device(lambda: self._layers.clear(left))
            self._leaving -= left
