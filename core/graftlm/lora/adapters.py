"""The low-rank adapters (arXiv:2106.09685) that an engine holds: their names, and the slots that they lie in.

A request keeps the adapter it came with until it ends. An adapter that is unloaded loses its name at once, and its slot
when the last of its requests has ended:

    load "sql"      name sql -> slot 1
    unload "sql"    no name, slot 1 still taken by its requests
    load "sql"      name sql -> slot 2, another content
    they end        slot 1 is free
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from graftlm.errors import AdapterError, AdapterNotFoundError

__all__ = [
    "BASE_SLOT",
    "AdapterCatalog",
    "LoadedAdapter",
    "adapter_not_found",
    "check_adapter_name",
    "prefix_namespace",
]

#: The slot of requests without an adapter: the model itself.
BASE_SLOT = 0

#: Longer names make model ids that nobody can read.
_MAX_NAME_LEN = 128

_ADAPTER_PREFIX, _SALT_PREFIX = "lora:", "salt:"


@dataclass(slots=True, eq=False)
class LoadedAdapter:
    """An adapter on the device. It is itself and no other, also when another one comes to have its name.

    Attributes:
        path: the folder it was read from.
        slot: its place in the layers' tensors, from 1 on.
        digest: of its content; adapters with the same digest compute the same.
        is_unloaded: it takes no more requests.
    """

    name: str
    path: str
    slot: int
    digest: str
    is_unloaded: bool = False


class AdapterCatalog:
    """Finds adapters by name, and slots for new ones. One thread changes it, any thread may read.

    Args:
        num_slots: adapters on the device at most.
    """

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._by_name: Mapping[str, LoadedAdapter] = MappingProxyType({})  # replaced, never changed: others read it

    @property
    def loaded(self) -> Mapping[str, LoadedAdapter]:
        """The adapters that take requests, by name, as of now."""
        return self._by_name

    def find(self, name: str) -> LoadedAdapter:
        """Return the adapter of a name.

        Raises:
            AdapterNotFoundError: there is none.
        """
        adapter = self._by_name.get(name)
        if adapter is None:
            raise adapter_not_found(name, self._by_name)
        return adapter

    def check_new(self, name: str) -> None:
        """Check that an adapter may be loaded under a name.

        Raises:
            AdapterError: the name is taken, or is none.
        """
        check_adapter_name(name)
        if name in self._by_name:
            path = self._by_name[name].path
            raise AdapterError(f"an adapter {name!r} is loaded already, from {path}. Unload it first.")

    def free_slot(self, used: Collection[int]) -> int:
        """Return a slot for one more adapter.

        Args:
            used: slots of unfinished requests; those of unloaded adapters are among them.

        Raises:
            AdapterError: there is none.
        """
        named = {adapter.slot for adapter in self._by_name.values()}
        slot = next((slot for slot in range(1, self._num_slots + 1) if slot not in named and slot not in used), None)
        if slot is not None:
            return slot
        num_leaving = self._num_slots - len(named)
        leaving = f"; {num_leaving} were unloaded and have requests under way" if num_leaving else ""
        raise AdapterError(
            f"all {self._num_slots} places for adapters are taken. Loaded: {', '.join(self._by_name) or 'none'}"
            f"{leaving}. Unload one, or raise lora.max_loaded."
        )

    def add(self, adapter: LoadedAdapter) -> None:
        """Let requests have an adapter, whose slot holds it."""
        self._by_name = MappingProxyType({**self._by_name, adapter.name: adapter})

    def remove(self, name: str) -> LoadedAdapter:
        """Take the name from an adapter, which finishes the requests it has; returns it.

        Raises:
            AdapterNotFoundError: there is none of that name.
        """
        adapter = self.find(name)
        adapter.is_unloaded = True
        self._by_name = MappingProxyType({key: value for key, value in self._by_name.items() if key != name})
        return adapter


def adapter_not_found(name: str, loaded: Collection[str]) -> AdapterNotFoundError:
    """Return the error for a name that is not among those of the loaded adapters."""
    return AdapterNotFoundError(f"no adapter {name!r:.200} is loaded. Loaded: {', '.join(sorted(loaded)) or 'none'}.")


def check_adapter_name(name: object) -> None:
    """Check a new adapter's name, which becomes a part of the id `model:adapter`.

    Raises:
        AdapterError: it is empty, too long, or holds white space or a colon.
    """
    if not isinstance(name, str) or not 0 < len(name) <= _MAX_NAME_LEN:
        raise AdapterError(f"an adapter's name has 1 to {_MAX_NAME_LEN} characters, got {name!r:.200}")
    if ":" in name or not name.isprintable() or " " in name:
        raise AdapterError(f"an adapter's name holds no white space, colon or control character, got {name!a}")


def prefix_namespace(cache_salt: str, adapter_id: str | None) -> str:
    """Return the namespace of cached prefixes: of one salt and one adapter, and of no other pair.

    A salt without an adapter is its own namespace, unless it looks like another pair's.

    Args:
        adapter_id: a digest of the adapter's content, without colons; None for no adapter.
    """
    if adapter_id is not None:
        return f"{_ADAPTER_PREFIX}{adapter_id}:{cache_salt}"
    return _SALT_PREFIX + cache_salt if cache_salt.startswith((_ADAPTER_PREFIX, _SALT_PREFIX)) else cache_salt
