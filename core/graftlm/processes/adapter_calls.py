"""A replica's answers to calls about adapters: they are read beside the steps, and installed between two of them."""

import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from graftlm.adapter_loading import AdapterLoader
from graftlm.errors import AdapterError, GraftlmError
from graftlm.peft_adapter import AdapterWeights
from graftlm.processes.messages import Call

__all__ = ["AdapterCalls"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Reading:
    call: Call
    name: str
    path: str
    weights: Future[AdapterWeights]


class AdapterCalls:
    """Loads and unloads the adapters of one replica. Belongs to the thread that runs the steps.

    Args:
        loader: None where the replica takes no adapters.
        wake: called from any thread when `take_read` has something to return.
    """

    def __init__(self, loader: AdapterLoader | None, wake: Callable[[], None]) -> None:
        self._maybe_loader = loader
        self._wake = wake
        self._reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="graftlm-adapter")
        self._readings: list[_Reading] = []

    def begin_load(self, call: Call) -> None:
        """Begin to read the adapter `path` that is to be called `name`; `take_read` returns the call when it is done.

        Raises:
            AdapterError: there is no room for adapters.
        """
        name, path = call.arguments["name"], call.arguments["path"]
        weights = self._reader.submit(self._loader.read, name, path)
        self._readings.append(_Reading(call, name, path, weights))
        weights.add_done_callback(lambda done: self._wake())

    def take_read(self) -> list[tuple[Call, Callable[[], str]]]:
        """Return the calls whose adapter has been read, each with what installs it and returns its digest.

        That raises AdapterError when the adapter does not fit.
        """
        done = [reading for reading in self._readings if reading.weights.done()]
        self._readings = [reading for reading in self._readings if reading not in done]
        return [(reading.call, partial(self._install, reading)) for reading in done]

    def unload(self, name: str) -> int:
        """Take no more requests for an adapter; returns how many go on with it.

        Raises:
            AdapterNotFoundError: no adapter has that name.
        """
        return self._loader.unload(name)

    def set_all(self, adapters: Mapping[str, str]) -> None:
        """Have these adapters and no others, name -> path, before anything else happens: the replica is a fresh one.

        One that cannot be loaded is left out; requests for it are refused.
        """
        loader = self._loader
        for name, adapter in list(loader.loaded.items()):
            if adapters.get(name) != adapter.path:
                loader.unload(name)
        for name, path in adapters.items():
            if name in loader.loaded:
                continue
            try:
                loader.install(name, path, loader.read(name, path))
            except GraftlmError:
                logger.exception("adapter %s of %s cannot be loaded again; requests for it are refused", name, path)

    def close(self) -> None:
        """Read nothing more."""
        self._reader.shutdown(wait=False, cancel_futures=True)

    def _install(self, reading: _Reading) -> str:
        return self._loader.install(reading.name, reading.path, reading.weights.result()).digest

    @property
    def _loader(self) -> AdapterLoader:
        if self._maybe_loader is None:
            raise AdapterError("this server has no room for adapters. Set lora.enabled: true, or lora.adapters.")
        return self._maybe_loader
