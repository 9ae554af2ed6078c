"""Reads the metadata and tensors of a GGUF file, or of the parts of a split one."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from graftlm.checkpoint.gguf.layout import GGUFLayout, TensorPlace, read_layout
from graftlm.checkpoint.location import checkpoint_files
from graftlm.errors import CheckpointError, WeightError

if TYPE_CHECKING:
    import torch
    from gguf import GGMLQuantizationType
    from torch import Tensor

__all__ = ["GGUFFile", "shortest"]

#: Number of weights that are decoded at a time, which limits the memory for temporary float32 values.
_PANEL_WEIGHTS = 1 << 20
#: Largest number in metadata, which are float32; larger numbers would become infinity.
_LARGEST = float(np.finfo(np.float32).max)


class GGUFFile:
    """Reads a model's metadata on creation, and its tensors on demand.

    Args:
        path: the file, or the first of several parts.

    Raises:
        CheckpointError: a file is missing or malformed, the package `gguf` is missing, or two tensors have the same
            name.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        layouts = [(file, read_layout(file)) for file in checkpoint_files(path)]
        self._metadata = layouts[0][1].metadata
        self._tensors: dict[str, _StoredTensor] = {}
        for file, layout in layouts:
            for place in layout.tensors:
                if place.name in self._tensors:
                    raise CheckpointError(f"{file} has the tensor {place.name!r} a second time")
                self._tensors[place.name] = _StoredTensor(file, layout, place)
        self._architecture = ""
        self._architecture = str(self._value("general.architecture"))

    @property
    def path(self) -> Path:
        """Path of the file."""
        return self._path

    @property
    def architecture(self) -> str:
        """The architecture's name in llama.cpp, such as "llama"."""
        return self._architecture

    def get(self, key: str) -> Any:
        """Return an entry of the metadata, or None if there is none.

        Args:
            key: name of the entry; "{arch}" in it is replaced by the architecture.
        """
        return self._metadata.get(key.replace("{arch}", self._architecture) if "{arch}" in key else key)

    def size(self, key: str, default: int | None = None) -> int:
        """Return an integer above 0; if the file has one integer per layer, all must be equal.

        Args:
            key: see `get`.
            default: used if the entry is missing; None: the entry is required.

        Raises:
            CheckpointError: the entry is missing or has another value.
        """
        value = self._value(key, default)
        values = set(value) if isinstance(value, list) else {value}
        size = values.pop() if len(values) == 1 else None
        if isinstance(size, bool) or not isinstance(size, int) or size <= 0:
            raise self._wrong(key, "a whole number above 0, the same for all layers", value)
        return size

    def number(self, key: str, default: float | None = None) -> float:
        """Return a number above 0, rounded by `shortest`: 1e-6, not 9.999999974752427e-07.

        Args:
            key: see `get`.
            default: used if the entry is missing; None: the entry is required.

        Raises:
            CheckpointError: the entry is missing or has another value.
        """
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= _LARGEST:
            raise self._wrong(key, "a number above 0", value)
        return shortest(value)

    def _value(self, key: str, default: float | None = None) -> Any:
        value = self.get(key)
        value = default if value is None else value
        if value is None:
            raise CheckpointError(f"{self._path} has no {key.replace('{arch}', self._architecture)} in its metadata")
        return value

    def _wrong(self, key: str, expected: str, value: object) -> CheckpointError:
        key = key.replace("{arch}", self._architecture)
        return CheckpointError(f"{self._path}: {key} must be {expected}, got {value!r}")

    def __iter__(self) -> Iterator[str]:
        """Yield the names of all tensors, in the order of the file."""
        return iter(self._tensors)

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape.

        Raises:
            CheckpointError: there is no such tensor.
        """
        return self._tensor(name).shape

    def type_name(self, name: str) -> str:
        """Return the storage type of a tensor, such as "F16" or "Q4_K".

        Raises:
            CheckpointError: there is no such tensor.
        """
        return self._tensor(name).kind.name

    def num_bytes(self, name: str) -> int:
        """Return the size of a tensor in the file, in bytes."""
        return self._tensor(name).num_bytes

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        """Return a tensor on the CPU.

        Args:
            name: name of the tensor.
            dtype: dtype of decoded tensors; float32, float16 and bfloat16 tensors keep their dtype and are
                memory-mapped.

        Raises:
            CheckpointError: there is no such tensor.
            WeightError: the package `gguf` cannot decode its storage type.
        """
        return self._tensor(name).read(dtype)

    def _tensor(self, name: str) -> _StoredTensor:
        if name not in self._tensors:
            raise CheckpointError(f"{self._path} has no tensor {name!r}")
        return self._tensors[name]


def shortest(number: float) -> float:
    """Return the shortest decimal number that rounds to the same float32 as `number`."""
    return float(str(np.float32(number)))


class _StoredTensor:
    """One tensor in a file.

    Args:
        file: path of the file, for messages.
        layout: layout of the file.
        place: place of the tensor.

    Raises:
        CheckpointError: the file is truncated, or the package `gguf` is missing or does not support the storage type.
    """

    def __init__(self, file: Path, layout: GGUFLayout, place: TensorPlace) -> None:
        self.name = place.name
        self.shape = place.shape
        self.kind, self._row_bytes = _row_form(file, place)
        self.num_bytes = math.prod(place.shape[:-1]) * self._row_bytes
        end = place.offset + self.num_bytes
        if end > len(layout.data):
            raise CheckpointError(
                f"{file} is truncated or not a GGUF file: the tensor {place.name!r} ends at byte {end} of "
                f"{len(layout.data)}"
            )
        self._data = layout.data[place.offset : end]

    def read(self, dtype: torch.dtype) -> Tensor:
        """Return the values; quantized values are decoded to `dtype`."""
        import torch

        match self.kind.name:
            case "F32":
                return torch.from_numpy(self._data.view(np.float32)).view(self.shape)
            case "F16":
                return torch.from_numpy(self._data.view(np.float16)).view(self.shape)
            case "BF16":
                return torch.from_numpy(self._data.view(np.int16)).view(torch.bfloat16).view(self.shape)
        return self._decoded(self._data.reshape(-1, self._row_bytes), dtype).view(self.shape)

    def _decoded(self, rows: NDArray[np.uint8], dtype: torch.dtype) -> Tensor:
        """Return the values of all rows, panel by panel."""
        import torch
        from gguf import dequantize

        values = torch.empty(len(rows), self.shape[-1], dtype=dtype)
        num_rows = max(1, _PANEL_WEIGHTS // self.shape[-1])
        try:
            for first in range(0, len(rows), num_rows):
                panel = slice(first, first + num_rows)
                values[panel] = torch.from_numpy(dequantize(rows[panel], self.kind))
        except NotImplementedError as error:
            raise WeightError(
                f"The tensor {self.name!r} is stored as {self.kind.name}, which the package gguf cannot decode"
            ) from error
        return values


def _row_form(file: Path, place: TensorPlace) -> tuple[GGMLQuantizationType, int]:
    """Return the storage type of a tensor, and the number of bytes of a row (values along the last dimension)."""
    try:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
    except ImportError as error:
        raise CheckpointError(
            f"{file} needs the package gguf, which is not installed. Install it: pip install 'graftlm[gguf]'"
        ) from error
    try:
        kind = GGMLQuantizationType(place.type_id)
    except ValueError as error:
        raise CheckpointError(
            f"{file}: the tensor {place.name!r} is stored as ggml's type {place.type_id}, which the installed package "
            f"gguf does not know"
        ) from error
    block_values, block_bytes = GGML_QUANT_SIZES[kind]
    num_columns = place.shape[-1] if place.shape else 0
    if num_columns == 0 or num_columns % block_values:
        raise CheckpointError(
            f"{file}: the tensor {place.name!r} has shape {list(place.shape)}, whose rows are not whole blocks of "
            f"{block_values} {kind.name} values"
        )
    return kind, num_columns // block_values * block_bytes
