"""Reads and checks entries of quantization_config that several formats have."""

from collections.abc import Mapping
from typing import Any

from graftlm.errors import CheckpointError

__all__ = ["read_block_size", "read_group_size", "read_object"]


def read_object(settings: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return an object; an empty one if it is missing or null.

    Raises:
        CheckpointError: the entry has another type.
    """
    value = settings.get(name)
    value = {} if value is None else value
    if not isinstance(value, Mapping):
        raise CheckpointError(f"quantization_config needs an object for {name}, got {value!r}")
    return value


def read_group_size(settings: Mapping[str, Any], name: str) -> int | None:
    """Return the number of inputs per scale; None: all inputs of an output (-1 or null in the file).

    Raises:
        CheckpointError: the entry has another value.
    """
    value = settings.get(name)
    if value in (None, -1):
        return None
    return _positive(value, name)


def read_block_size(settings: Mapping[str, Any], name: str) -> tuple[int, int] | None:
    """Return the numbers of outputs and inputs per scale; None if the entry is missing or null.

    Raises:
        CheckpointError: the entry has another value.
    """
    value = settings.get(name)
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != 2:
        raise CheckpointError(f"quantization_config needs {name} as two integers above 0, got {value!r}")
    return _positive(value[0], name), _positive(value[1], name)


def _positive(value: Any, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise CheckpointError(f"quantization_config needs integers above 0 for {name}, got {value!r}")
    return value
