"""A replica's answers to calls about adapters: they are read beside the steps, and installed between two of them."""

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
    """Loads and unloads the adapters of one replica. Belongs to the thread that runs the steps.

    Args:
        loader: None where the replica takes no adapters.
        wake: called from any thread when `take_read` has something to return.
    """

    def __init__(self, loader: AdapterLoader | None, wake: Callable[[], None]) -> None:
        self._maybe_loader = loader
        self._wake = wake
        self._readings: list[_Reading] = []

    def begin_load(self, call: Call) -> None:
        """Begin to read the adapter `path` that is to be called `name`; `take_read` returns the call when it is done.

        Raises:
            AdapterError: there is no room for adapters.
        """
        name, path = call.arguments["name"], call.arguments["path"]
        weights = _read_beside(self._loader, name, path)
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

        One that is still being read will not be installed, however long that takes. A name that is not known here has
        no requests: a replica that was started again may have had to leave it out.
        """
        loader = self._loader
        self._readings = [reading for reading in self._readings if reading.name != name]
        return loader.unload(name) if name in loader.loaded else 0

    def set_all(self, adapters: Mapping[str, Mapping[str, str | None]]) -> None:
        """Have these adapters and no others, before anything else happens: the replica is a fresh one.

        One that cannot be loaded, or has another content than the other replicas serve, is left out; requests for it
        are refused.

        Args:
            adapters: "path" and "digest" by name; a digest of None is any.
        """
        loader = self._loader
        for name, adapter in list(loader.loaded.items()):
            wanted = adapters.get(name)
            if wanted is None or adapter.path != wanted["path"] or wanted["digest"] not in (None, adapter.digest):
                loader.unload(name)
        for name, wanted in adapters.items():
            if name in loader.loaded:
                continue
            try:
                self._load_again(name, str(wanted["path"]), wanted["digest"])
            except Exception:  # whatever is wrong with one, the others are wanted
                logger.exception(
                    "adapter %s of %s cannot be loaded again; requests for it are refused", name, wanted["path"]
                )

    def _load_again(self, name: str, path: str, digest: str | None) -> None:
        weights = self._loader.read(name, path)
        if digest not in (None, weights.digest):
            raise AdapterError(
                f"{path} has another content now (digest {weights.digest}) than the server has under the name {name!r} "
                f"({digest}). Unload it, and load it again."
            )
        self._loader.install(name, path, weights)

    def _install(self, reading: _Reading) -> str:
        return self._loader.install(reading.name, reading.path, reading.weights.result()).digest

    @property
    def _loader(self) -> AdapterLoader:
        if self._maybe_loader is None:
            raise AdapterError("this server has no room for adapters. Set lora.enabled: true, or lora.adapters.")
        return self._maybe_loader


def _read_beside(loader: AdapterLoader, name: str, path: str) -> Future[AdapterWeights]:
    """Read in a thread of its own: one that hangs, such as on a network's file system, keeps no other waiting."""
    weights: Future[AdapterWeights] = Future()

    def read() -> None:
        try:
            weights.set_result(loader.read(name, path))
        except BaseException as error:
            weights.set_exception(error)

    threading.Thread(target=read, name=f"graftlm-adapter-{name:.20}", daemon=True).start()
    return weights
