"""The names and slots of an engine's LoRA adapters (arXiv:2106.09685).

A request uses the same adapter until it ends. Unloading an adapter removes its name immediately, and frees its slot
when the last request with the adapter has ended:

    load "sql"      name sql -> slot 1
    unload "sql"    no name, slot 1 still used by its requests
    load "sql"      name sql -> slot 2, with other content
    requests end    slot 1 is free
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from graftlm.errors import AdapterError, AdapterNotFoundError

__all__ = [
    "BASE_SLOT",
    "AdapterCatalog",
    "LoadedAdapter",
    "adapter_name",
    "adapter_not_found",
    "check_adapter_name",
    "prefix_namespace",
    "split_namespace",
]

#: The slot of requests without an adapter.
BASE_SLOT = 0

#: Maximum length of an adapter's name, which limits the length of model ids, `model:adapter`.
_MAX_NAME_LEN = 128

_ADAPTER_PREFIX, _SALT_PREFIX = "lora:", "salt:"


@dataclass(slots=True, eq=False)
class LoadedAdapter:
    """An adapter on the device. It compares by identity: a later adapter with the same name is another adapter.

    Attributes:
        path: the folder from which it was read.
        slot: index of the adapter in the layers' tensors, at least 1.
        digest: digest of the adapter's content; adapters with the same digest give the same results.
        is_unloaded: whether the adapter accepts no more requests.
    """

    name: str
    path: str
    slot: int
    digest: str
    is_unloaded: bool = False


class AdapterCatalog:
    """Finds adapters by name, and free slots. One thread changes the catalog; any thread may read it.

    Args:
        num_slots: maximum number of adapters on the device.
    """

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._by_name: Mapping[str, LoadedAdapter] = MappingProxyType(
            {}
        )  # replaced, never changed in place: other threads read it

    @property
    def loaded(self) -> Mapping[str, LoadedAdapter]:
        """The adapters that accept requests, by name; an immutable snapshot."""
        return self._by_name

    def find(self, name: str) -> LoadedAdapter:
        """Return the adapter of a name.

        Raises:
            AdapterNotFoundError: no loaded adapter has this name.
        """
        adapter = self._by_name.get(name)
        if adapter is None:
            raise adapter_not_found(name, self._by_name)
        return adapter

    def check_new(self, name: str) -> None:
        """Check that a new adapter may have a name.

        Raises:
            AdapterError: the name is used or invalid.
        """
        check_adapter_name(name)
        if name in self._by_name:
            path = self._by_name[name].path
            raise AdapterError(f"an adapter {name!r} is already loaded from {path}. Unload it first.")

    def free_slot(self, used: Collection[int]) -> int:
        """Return a free slot.

        Args:
            used: slots of unfinished requests, including those of unloaded adapters.

        Raises:
            AdapterError: no slot is free.
        """
        named = {adapter.slot for adapter in self._by_name.values()}
        slot = next((slot for slot in range(1, self._num_slots + 1) if slot not in named and slot not in used), None)
        if slot is not None:
            return slot
        num_leaving = self._num_slots - len(named)
        leaving = f"; {num_leaving} were unloaded but have unfinished requests" if num_leaving else ""
        raise AdapterError(
            f"all {self._num_slots} adapter slots are used. Loaded: {', '.join(self._by_name) or 'none'}"
            f"{leaving}. Unload one, or increase lora.max_loaded."
        )

    def add(self, adapter: LoadedAdapter) -> None:
        """Make an adapter available to requests; its factors are already in its slot."""
        self._by_name = MappingProxyType({**self._by_name, adapter.name: adapter})

    def remove(self, name: str) -> LoadedAdapter:
        """Remove an adapter's name; its unfinished requests continue. Returns: the adapter.

        Raises:
            AdapterNotFoundError: no loaded adapter has this name.
        """
        adapter = self.find(name)
        adapter.is_unloaded = True
        self._by_name = MappingProxyType({key: value for key, value in self._by_name.items() if key != name})
        return adapter


def adapter_not_found(name: str, loaded: Collection[str]) -> AdapterNotFoundError:
    """Return the error for a name that no loaded adapter has."""
    return AdapterNotFoundError(f"no adapter {name!r:.200} is loaded. Loaded: {', '.join(sorted(loaded)) or 'none'}.")


def check_adapter_name(name: object) -> None:
    """Check a new adapter's name, which becomes a part of the id `model:adapter`.

    Raises:
        AdapterError: the name is empty, too long, or contains white space, a colon or a control character.
    """
    if not isinstance(name, str) or not 0 < len(name) <= _MAX_NAME_LEN:
        raise AdapterError(f"an adapter's name must have 1 to {_MAX_NAME_LEN} characters, got {name!r:.200}")
    if ":" in name or not name.isprintable() or " " in name:
        raise AdapterError(
            f"an adapter's name must not contain white space, colons or control characters, got {name!a}"
        )


def prefix_namespace(cache_salt: str, adapter_id: str | None) -> str:
    """Return the namespace of cached prefixes, which is unique per pair of salt and adapter.

    Without an adapter, the namespace is the salt. A prefix is added if this salt could be the namespace of another
    pair.

    Args:
        adapter_id: a digest of the adapter's content, without colons; None for no adapter.
    """
    if adapter_id is not None:
        return f"{_ADAPTER_PREFIX}{adapter_id}:{cache_salt}"
    return _SALT_PREFIX + cache_salt if cache_salt.startswith((_ADAPTER_PREFIX, _SALT_PREFIX)) else cache_salt


def split_namespace(namespace: str) -> tuple[str, str | None]:
    """Return the cache salt and the adapter id of a namespace; the inverse of `prefix_namespace`."""
    if namespace.startswith(_ADAPTER_PREFIX):
        adapter_id, _, cache_salt = namespace.removeprefix(_ADAPTER_PREFIX).partition(":")
        return cache_salt, adapter_id
    return namespace.removeprefix(_SALT_PREFIX), None


def adapter_name(loaded: Mapping[str, LoadedAdapter], digest: str) -> str | None:
    """Return the name of a loaded adapter with this digest; None if there is none."""
    return next((name for name, adapter in loaded.items() if adapter.digest == digest), None)
