"""Indexing of tensors on a fake CUDA device, by the operations that PyTorch's indexing consists of.

PyTorch's own indexing needs a device guard, which a build without CUDA lacks.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from graftlm.testing.fake_cuda_errors import HiddenSyncError

__all__ = ["read_index", "write_index"]


def read_index(tensor: Tensor, key: Any) -> Tensor:
    """Return tensor[key].

    Raises:
        HiddenSyncError: the key holds a mask, a 0-dimensional tensor or a list.
    """
    view, indices = _view(tensor, key)
    if not indices:
        return view
    result: Tensor = torch.ops.aten.index.Tensor(view, indices)
    return result


def write_index(tensor: Tensor, key: Any, value: Any) -> None:
    """Do tensor[key] = value; raises as `read_index`."""
    target = read_index(tensor, key)
    if isinstance(value, Tensor) and np.broadcast_shapes(value.shape, target.shape) != target.shape:
        raise ValueError(f"values of {list(value.shape)} are written to {list(target.shape)}")


def _view(tensor: Tensor, key: Any) -> tuple[Tensor, list[Tensor | None]]:
    """Return the view that a key's numbers and slices choose, and its tensors by dimension of the view."""
    parts = _without_ellipsis(key if isinstance(key, tuple) else (key,), tensor.dim())
    indices: list[Tensor | None] = []
    dims = iter(zip(tensor.shape, tensor.stride(), strict=True))
    shape: list[int] = []
    strides: list[int] = []
    offset = tensor.storage_offset()
    for part in parts:
        if part is None:
            size, stride = 1, 1
        else:
            size, stride = next(dims)
        if isinstance(part, slice):
            places = range(*part.indices(size))
            offset += places.start * stride if places else 0
            size, stride = len(places), stride * places.step
        elif isinstance(part, Tensor):
            _check_index(part)
            indices += [None] * (len(shape) - len(indices)) + [part]
        elif part is not None:
            offset += _place(part, size) * stride
            continue
        shape.append(size)
        strides.append(stride)
    return tensor.as_strided(shape, strides, offset), indices


def _place(index: Any, size: int) -> int:
    """Return the place of a number, counted from the front."""
    if not isinstance(index, (int, np.integer)) or isinstance(index, bool):
        raise HiddenSyncError(f"an index of type {type(index).__name__} is copied to the device and waited for")
    place = int(index)
    if not -size <= place < size:
        raise IndexError(f"index {place} is out of bounds for a dimension of size {size}")
    return place % size


def _without_ellipsis(parts: tuple[Any, ...], num_dims: int) -> list[Any]:
    """Return the parts of a key with full slices for an ellipsis."""
    at = next((i for i, part in enumerate(parts) if part is Ellipsis), len(parts))
    num_given = sum(part is not None and part is not Ellipsis for part in parts)
    return [*parts[:at], *[slice(None)] * (num_dims - num_given), *parts[at + 1 :]]


def _check_index(index: Tensor) -> None:
    if index.dtype in (torch.bool, torch.uint8):
        raise HiddenSyncError("a mask as an index: the host waits for the number of its entries")
    if index.dim() == 0:
        raise HiddenSyncError("a 0-dimensional tensor as an index: the host waits for its number")
