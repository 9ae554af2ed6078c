"""A GGUF file, or the files that one was split into: metadata by key, and tensors by name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from graftlm.checkpoint.location import checkpoint_files
from graftlm.errors import CheckpointError, WeightError

if TYPE_CHECKING:
    import torch
    from gguf import GGUFReader
    from gguf.gguf_reader import ReaderTensor
    from torch import Tensor

__all__ = ["GGUFFile"]

#: Weights decoded at a time, which bounds the memory for float32 values in between.
_PANEL_WEIGHTS = 1 << 20


class GGUFFile:
    """Reads a model's metadata at once, and its tensors when they are asked for.

    Args:
        path: the file, or the first of several.

    Raises:
        CheckpointError: a file is missing or broken, or the package `gguf` is.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        readers = [_open(file) for file in checkpoint_files(path)]
        self._metadata = readers[0].fields
        self._tensors: dict[str, ReaderTensor] = {tensor.name: tensor for it in readers for tensor in it.tensors}
        self._architecture = str(self.value("general.architecture"))

    @property
    def path(self) -> Path:
        """Where it lies."""
        return self._path

    @property
    def architecture(self) -> str:
        """The architecture's name in llama.cpp, such as "llama"."""
        return self._architecture

    def get(self, key: str) -> Any:
        """Return an entry of the metadata, or None if there is none.

        Args:
            key: "{arch}" in it stands for the architecture.
        """
        field = self._metadata.get(key.replace("{arch}", self._architecture) if "{arch}" in key else key)
        return None if field is None else field.contents()

    def value(self, key: str) -> Any:
        """Return an entry of the metadata.

        Raises:
            CheckpointError: there is none.
        """
        value = self.get(key)
        if value is None:
            raise CheckpointError(f"{self._path} has no {key.replace('{arch}', self._architecture)} in its metadata")
        return value

    def __iter__(self) -> Iterator[str]:
        """Yield the names of all tensors, in the order they lie in."""
        return iter(self._tensors)

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape; GGUF's own order of dimensions is the reverse.

        Raises:
            CheckpointError: there is no such tensor.
        """
        return tuple(int(size) for size in reversed(self._tensor(name).shape))

    def type_name(self, name: str) -> str:
        """Return how a tensor is stored, such as "F16" or "Q4_K".

        Raises:
            CheckpointError: there is no such tensor.
        """
        return str(self._tensor(name).tensor_type.name)

    def num_bytes(self, name: str) -> int:
        """Return the bytes that a tensor takes in the file."""
        return int(self._tensor(name).n_bytes)

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        """Return a tensor on the CPU.

        Args:
            name: the tensor's.
            dtype: to decode to; float32, float16 and bfloat16 tensors stay what they are, mapped from the file.

        Raises:
            CheckpointError: there is no such tensor.
            WeightError: it is stored in a way that the package `gguf` does not decode.
        """
        import torch

        tensor, shape = self._tensor(name), self.shape(name)
        match self.type_name(name):
            case "F32" | "F16":
                return torch.from_numpy(tensor.data).view(shape)
            case "BF16":
                return torch.from_numpy(tensor.data.view(np.int16)).view(torch.bfloat16).view(shape)
        return _decoded(tensor, dtype).view(shape)

    def _tensor(self, name: str) -> ReaderTensor:
        if name not in self._tensors:
            raise CheckpointError(f"{self._path} has no tensor {name!r}")
        return self._tensors[name]


def _open(file: Path) -> GGUFReader:
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise CheckpointError(
            f"{file} can be read only with the package gguf, which is missing. Install it: pip install 'graftlm[gguf]'"
        ) from error
    try:
        return GGUFReader(file, "c")  # copy-on-write: torch takes no arrays that may not be written
    except Exception as error:  # the reader raises whatever numpy does with the bytes that it finds
        raise CheckpointError(f"{file} is truncated or not a GGUF file ({type(error).__name__}: {error})") from error


def _decoded(tensor: ReaderTensor, dtype: torch.dtype) -> Tensor:
    """Return a quantized tensor's values, [rows, columns], panel by panel."""
    import torch
    from gguf import dequantize

    rows = tensor.data.reshape(-1, tensor.data.shape[-1])
    num_columns = int(tensor.shape[0])
    values = torch.empty(len(rows), num_columns, dtype=dtype)
    num_rows = max(1, _PANEL_WEIGHTS // num_columns)
    try:
        for first in range(0, len(rows), num_rows):
            panel = slice(first, first + num_rows)
            values[panel] = torch.from_numpy(dequantize(rows[panel], tensor.tensor_type))
    except NotImplementedError as error:
        raise WeightError(
            f"The tensor {tensor.name!r} is stored as {tensor.tensor_type.name}, which the package gguf does not decode"
        ) from error
    return values
