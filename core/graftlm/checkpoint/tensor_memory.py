"""Tensors in shared memory that another process has filled."""

import mmap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from graftlm.errors import RequestError

__all__ = ["TensorPlace", "map_tensors", "parse_dtype", "place_tensors", "tensor_at"]

#: Offsets of tensors are multiples of this.
_ALIGNMENT_BYTES: Final = 64

#: Name, name of the dtype, shape, and offset in bytes; plain data, so that messages can contain it.
TensorPlace = tuple[str, str, list[int], int]


def parse_dtype(name: str) -> torch.dtype:
    """Return the dtype with a name such as "bfloat16" or "torch.bfloat16".

    Raises:
        RequestError: there is no such dtype.
    """
    dtype = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise RequestError(f"unknown dtype {name!r}; expected a name of PyTorch such as bfloat16")
    return dtype


def place_tensors(
    names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]]
) -> tuple[list[TensorPlace], int]:
    """Return the places of tensors one behind another, and the total number of bytes.

    Raises:
        RequestError: the sequences have different lengths, or a dtype or a shape is not valid.
    """
    if not len(names) == len(dtypes) == len(shapes):
        raise RequestError(
            f"names, dtypes and shapes must have the same length, got {len(names)}, {len(dtypes)} and {len(shapes)}"
        )
    places: list[TensorPlace] = []
    end = 0
    for name, dtype, shape in zip(names, dtypes, shapes, strict=True):
        if any(size < 0 for size in shape):
            raise RequestError(f"the shape of {name!r} has a negative size: {list(shape)}")
        places.append((name, dtype, list(shape), end))
        end += -(-torch.Size(shape).numel() * parse_dtype(dtype).itemsize // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
    return places, end


def tensor_at(memory: Any, place: TensorPlace) -> Tensor:
    """Return a tensor in memory, not a copy.

    Args:
        memory: a writable buffer.
    """
    _, dtype_name, sizes, offset = place
    dtype, shape = parse_dtype(dtype_name), torch.Size(sizes)
    if not shape.numel():
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype, count=shape.numel(), offset=offset).view(shape)


def map_tensors(path: str, places: Sequence[TensorPlace]) -> Iterator[tuple[str, Tensor]]:
    """Yield the (name, tensor) pairs of a file, which stays mapped as long as a tensor exists.

    Args:
        path: path of the file; "" if all tensors are empty.

    Raises:
        OSError: the file cannot be mapped, for instance because its process has ended.
    """
    memory: Any = b""
    if path:
        with Path(path).open("r+b") as file:
            memory = mmap.mmap(file.fileno(), file.seek(0, 2))
    for place in places:
        yield place[0], tensor_at(memory, place)
