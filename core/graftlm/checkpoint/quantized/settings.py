"""Entries that several formats have in their quantization_config, with every number checked."""

from collections.abc import Mapping
from typing import Any

from graftlm.errors import CheckpointError

__all__ = ["read_block_size", "read_group_size", "read_object"]


def read_object(settings: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Read an object; absent or null: an empty one.

    Raises:
        CheckpointError: it is something else.
    """
    value = settings.get(name)
    value = {} if value is None else value
    if not isinstance(value, Mapping):
        raise CheckpointError(f"quantization_config needs an object for {name}, got {value!r}")
    return value


def read_group_size(settings: Mapping[str, Any], name: str) -> int | None:
    """Read how many inputs share a scale; None: all of an output, which is written -1 or null.

    Raises:
        CheckpointError: it is something else.
    """
    value = settings.get(name)
    if value in (None, -1):
        return None
    return _positive(value, name)


def read_block_size(settings: Mapping[str, Any], name: str) -> tuple[int, int] | None:
    """Read how many outputs and inputs share a scale; None where it is absent or null.

    Raises:
        CheckpointError: it is something else.
    """
    value = settings.get(name)
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != 2:
        raise CheckpointError(f"quantization_config needs {name} as two whole numbers above 0, got {value!r}")
    return _positive(value[0], name), _positive(value[1], name)


def _positive(value: Any, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise CheckpointError(f"quantization_config needs whole numbers above 0 for {name}, got {value!r}")
    return value
