"""Reads the layout of one GGUF file: metadata entries, and places of tensors.

The reader of the package `gguf` creates an object for each token and merge of the vocabulary, which takes seconds and
is not needed here. The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from graftlm.errors import CheckpointError

__all__ = ["GGUFLayout", "TensorPlace", "read_layout"]

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MOST_DIMENSIONS = 4
_ALIGNMENT = 32  # the default
_STRING, _ARRAY = 8, 9
#: Type of a value -> its format in `struct` and numpy, little-endian.
_NUMBERS = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "<?", 10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """The place of a tensor in a file.

    Attributes:
        shape: shape with the outermost dimension first, like in torch; the file has the reverse order.
        type_id: ggml's number of the storage type.
        offset: offset of the first byte in the file.
    """

    name: str
    shape: tuple[int, ...]
    type_id: int
    offset: int


@dataclass(frozen=True, slots=True)
class GGUFLayout:
    """The content of a file.

    Attributes:
        metadata: key -> number, string or list of numbers; lists of strings (of tokenizers) are skipped.
        tensors: places of the tensors, in the order of the file.
        data: uint8, the whole file, memory-mapped copy-on-write.
    """

    metadata: Mapping[str, Any]
    tensors: tuple[TensorPlace, ...]
    data: NDArray[np.uint8]


def read_layout(file: Path) -> GGUFLayout:
    """Read everything except the tensors' values.

    Raises:
        CheckpointError: the file cannot be read, is truncated before the tensors, or is not a GGUF file.
    """
    try:
        data: NDArray[np.uint8] = np.memmap(file, np.uint8, mode="c")
        return _parse(data)
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}") from error
    except (ValueError, OverflowError, struct.error) as error:
        raise CheckpointError(f"{file} is truncated or not a GGUF file: {error}") from error


def _parse(data: NDArray[np.uint8]) -> GGUFLayout:
    cursor = _Cursor(data)
    magic, version = cursor.bytes(len(_MAGIC)), cursor.number("<u4")
    if magic != _MAGIC or version not in _VERSIONS:
        raise ValueError(f"got magic number {magic!r}, version {version}, expected {_MAGIC!r}, version 2 or 3")
    num_tensors, num_entries = cursor.number("<u8"), cursor.number("<u8")
    metadata: dict[str, Any] = {}
    for _ in range(num_entries):
        key = cursor.text()
        value = cursor.value(cursor.number("<u4"))
        if value is not None:
            metadata[key] = value
    places = [_place(cursor) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", _ALIGNMENT)
    if not isinstance(alignment, int) or alignment <= 0:
        raise ValueError(f"general.alignment must be an integer above 0, got {alignment!r}")
    begin = -(-cursor.position // alignment) * alignment
    return GGUFLayout(metadata, tuple(place(begin) for place in places), data)


def _place(cursor: _Cursor) -> Callable[[int], TensorPlace]:
    """Read a tensor's entry; return a function from the offset of the tensors' data to the tensor's place."""
    name, num_dimensions = cursor.text(), cursor.number("<u4")
    if num_dimensions > _MOST_DIMENSIONS:
        raise ValueError(f"the tensor {name!r} has {num_dimensions} dimensions, expected at most {_MOST_DIMENSIONS}")
    sizes = [cursor.number("<u8") for _ in range(num_dimensions)]
    type_id, offset = cursor.number("<u4"), cursor.number("<u8")
    return lambda begin: TensorPlace(name, tuple(reversed(sizes)), type_id, begin + offset)


class _Cursor:
    """Reads consecutive values.

    Args:
        data: the file's content.
    """

    def __init__(self, data: NDArray[np.uint8]) -> None:
        self._view = data.data
        self.position = 0

    def bytes(self, num_bytes: int) -> bytes:
        """Read `num_bytes` bytes."""
        end = self.position + num_bytes
        if end > len(self._view):
            raise ValueError(f"it has {len(self._view)} bytes, expected at least {end}")
        found, self.position = self._view[self.position : end].tobytes(), end
        return found

    def number(self, form: str) -> Any:
        """Read a number."""
        return np.frombuffer(self.bytes(np.dtype(form).itemsize), form)[0].item()

    def text(self) -> str:
        """Read a string."""
        return self.bytes(self.number("<u8")).decode("utf-8")

    def value(self, kind: int) -> Any:
        """Read a value of the metadata; None for a list of strings, which is skipped."""
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            item_kind, length = self.number("<u4"), self.number("<u8")
            if item_kind == _STRING:
                return self._pass_texts(length)
            form = self._form(item_kind)
            return np.frombuffer(self.bytes(length * np.dtype(form).itemsize), form).tolist()
        return self.number(self._form(kind))

    def _form(self, kind: int) -> str:
        if kind not in _NUMBERS:
            raise ValueError(f"an entry of the metadata has the unknown type {kind}")
        return _NUMBERS[kind]

    def _pass_texts(self, count: int) -> None:
        length_at, view, position = struct.Struct("<Q").unpack_from, self._view, self.position
        for _ in range(count):
            position += 8 + length_at(view, position)[0]
        self.position = position
