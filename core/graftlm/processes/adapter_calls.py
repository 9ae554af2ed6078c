"""The calls that load and unload a replica's adapters.

Threads read the files. The weights are installed between steps.
"""

import logging
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

from graftlm.assembly.adapter_loading import AdapterLoader
from graftlm.errors import AdapterError
from graftlm.lora.peft_adapter import AdapterWeights
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
    """Loads and unloads the adapters of one replica. All methods are called in the thread that runs the steps.

    Args:
        loader: loads adapters; None if the replica does not support adapters.
        wake: called from any thread when `take_read` has a call to return.
    """

    def __init__(self, loader: AdapterLoader | None, wake: Callable[[], None]) -> None:
        self._maybe_loader = loader
        self._wake = wake
        self._readings: list[_Reading] = []

    def begin_load(self, call: Call) -> None:
        """Start to read an adapter in a thread. `take_read` returns the call after the adapter has been read.

        Args:
            call: the call, whose arguments are the `name` and the `path` of the adapter.

        Raises:
            AdapterError: the server does not support adapters.
        """
        name, path = call.arguments["name"], call.arguments["path"]
        weights = _read_in_thread(self._loader, name, path)
        self._readings.append(_Reading(call, name, path, weights))
        weights.add_done_callback(lambda done: self._wake())

    def take_read(self) -> list[tuple[Call, Callable[[], str]]]:
        """Return the calls whose adapter has been read. Each call is returned only once.

        Returns: pairs of a call and a function. The function installs the adapter and returns the adapter's digest. It
            raises AdapterError if the adapter does not fit the model.
        """
        done = [reading for reading in self._readings if reading.weights.done()]
        self._readings = [reading for reading in self._readings if reading not in done]
        return [(reading.call, partial(self._install, reading)) for reading in done]

    def unload(self, name: str) -> int:
        """Refuse new requests for an adapter. If the adapter is still being read, it is not installed.

        Returns: the number of requests that still use the adapter; 0 if this replica does not have the adapter, for
            example because loading failed after a restart.

        Raises:
            AdapterError: the server does not support adapters.
        """
        loader = self._loader
        self._readings = [reading for reading in self._readings if reading.name != name]
        return loader.unload(name) if name in loader.loaded else 0

    def set_all(self, adapters: Mapping[str, Mapping[str, str | None]]) -> None:
        """Load these adapters and unload all others. A restarted replica gets this call before its first request.

        If an adapter cannot be loaded, or its content differs from the content in the other replicas, this replica
        refuses requests for the adapter.

        Args:
            adapters: name -> {"path", "digest"}. A digest of None accepts any content.

        Raises:
            AdapterError: the server does not support adapters.
        """
        loader = self._loader
        for name, adapter in list(loader.loaded.items()):
            expected = adapters.get(name)
            if expected is None or adapter.path != expected["path"] or expected["digest"] not in (None, adapter.digest):
                loader.unload(name)
        for name, expected in adapters.items():
            if name in loader.loaded:
                continue
            try:
                self._load_again(name, str(expected["path"]), expected["digest"])
            except Exception:  # an error of one adapter must not prevent the loading of other adapters
                logger.exception(
                    "adapter %s of %s cannot be loaded again; requests for it are refused", name, expected["path"]
                )

    def _load_again(self, name: str, path: str, digest: str | None) -> None:
        weights = self._loader.read(name, path)
        if digest not in (None, weights.digest):
            raise AdapterError(
                f"the content of {path} has changed: its digest is {weights.digest}, and that of the loaded adapter "
                f"{name!r} is {digest}. Unload the adapter, and load it again."
            )
        self._loader.install(name, path, weights)

    def _install(self, reading: _Reading) -> str:
        return self._loader.install(reading.name, reading.path, reading.weights.result()).digest

    @property
    def _loader(self) -> AdapterLoader:
        if self._maybe_loader is None:
            raise AdapterError("this server does not support adapters. Set lora.enabled: true, or lora.adapters.")
        return self._maybe_loader


def _read_in_thread(loader: AdapterLoader, name: str, path: str) -> Future[AdapterWeights]:
    """Read an adapter in a separate thread, so that a slow file system does not delay other adapters."""
    weights: Future[AdapterWeights] = Future()

    def read() -> None:
        try:
            weights.set_result(loader.read(name, path))
        except BaseException as error:
            weights.set_exception(error)

    threading.Thread(target=read, name=f"graftlm-adapter-{name:.20}", daemon=True).start()
    return weights
