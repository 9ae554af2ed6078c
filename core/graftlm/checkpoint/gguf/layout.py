"""Where things lie in one GGUF file: entries of its metadata, and tensors.

The package `gguf` has a reader too. It makes an object of every token and merge of a vocabulary, which takes seconds;
nothing here needs those. The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
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
_ALIGNMENT = 32  # where a file says nothing else
_STRING, _ARRAY = 8, 9
#: Type of a value -> its form in `struct` and in numpy, little-endian.
_NUMBERS = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "<?", 10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """A tensor in a file.

    Attributes:
        shape: the outermost dimension first, as torch has it; the file has it the other way round.
        type_id: of ggml.
        offset: of its first byte in the file.
    """

    name: str
    shape: tuple[int, ...]
    type_id: int
    offset: int


@dataclass(frozen=True, slots=True)
class GGUFLayout:
    """What a file holds.

    Attributes:
        metadata: numbers, texts, and lists of numbers, by key; lists of texts, which tokenizers have, are left out.
        tensors: in the order that the file lists them in.
        data: uint8, the whole file, mapped; what is written to it stays in memory.
    """

    metadata: Mapping[str, Any]
    tensors: tuple[TensorPlace, ...]
    data: NDArray[np.uint8]


def read_layout(file: Path) -> GGUFLayout:
    """Read everything but the tensors' values.

    Raises:
        CheckpointError: the file cannot be read, is cut off before the tensors begin, or is no GGUF file.
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
        raise ValueError(f"it begins with {magic!r}, version {version}; expected {_MAGIC!r}, version 2 or 3")
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
        raise ValueError(f"general.alignment must be a whole number above 0, got {alignment!r}")
    begin = -(-cursor.position // alignment) * alignment
    return GGUFLayout(metadata, tuple(place(begin) for place in places), data)


def _place(cursor: _Cursor) -> Callable[[int], TensorPlace]:
    """Read a tensor's entry; return what makes its place once it is known where the tensors begin."""
    name, num_dimensions = cursor.text(), cursor.number("<u4")
    if num_dimensions > _MOST_DIMENSIONS:
        raise ValueError(f"the tensor {name!r} has {num_dimensions} dimensions, expected {_MOST_DIMENSIONS} at most")
    sizes = [cursor.number("<u8") for _ in range(num_dimensions)]
    type_id, offset = cursor.number("<u4"), cursor.number("<u8")
    return lambda begin: TensorPlace(name, tuple(reversed(sizes)), type_id, begin + offset)


class _Cursor:
    """Reads values one after the other.

    Args:
        data: of the file.
    """

    def __init__(self, data: NDArray[np.uint8]) -> None:
        self._view = data.data
        self.position = 0

    def bytes(self, num_bytes: int) -> bytes:
        """Return so many bytes."""
        end = self.position + num_bytes
        if end > len(self._view):
            raise ValueError(f"it ends after {len(self._view)} bytes, where {end} are needed")
        found, self.position = self._view[self.position : end].tobytes(), end
        return found

    def number(self, form: str) -> Any:
        """Return a number."""
        return np.frombuffer(self.bytes(np.dtype(form).itemsize), form)[0].item()

    def text(self) -> str:
        """Return a text."""
        return self.bytes(self.number("<u8")).decode("utf-8")

    def value(self, kind: int) -> Any:
        """Return a value of the metadata; None for a list of texts, which is passed over."""
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
            raise ValueError(f"an entry of the metadata has the type {kind}, which is unknown")
        return _NUMBERS[kind]

    def _pass_texts(self, count: int) -> None:
        length_at, view, position = struct.Struct("<Q").unpack_from, self._view, self.position
        for _ in range(count):
            position += 8 + length_at(view, position)[0]
        self.position = position
