"""Indexes tensors on a fake CUDA device with the operations that PyTorch's indexing consists of.

PyTorch's own indexing needs a device guard, which a build without CUDA does not have.
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
        HiddenSyncError: the key contains a mask, a 0-dimensional tensor or a list.
    """
    view, indices = _view(tensor, key)
    if not indices:
        return view
    result: Tensor = torch.ops.aten.index.Tensor(view, indices)
    return result


def write_index(tensor: Tensor, key: Any, value: Any) -> None:
    """Execute tensor[key] = value. Raises the same errors as `read_index`.

    Raises:
        ValueError: the value's shape cannot be broadcast to the target's.
    """
    target = read_index(tensor, key)
    if isinstance(value, Tensor) and np.broadcast_shapes(value.shape, target.shape) != target.shape:
        raise ValueError(f"values of shape {list(value.shape)} are written to a target of shape {list(target.shape)}")


def _view(tensor: Tensor, key: Any) -> tuple[Tensor, list[Tensor | None]]:
    """Return (view that the key's numbers and slices select, the key's tensor or None for each of its dimensions)."""
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
            selected = range(*part.indices(size))
            offset += selected.start * stride if selected else 0
            size, stride = len(selected), stride * selected.step
        elif isinstance(part, Tensor):
            _check_index(part)
            indices += [None] * (len(shape) - len(indices)) + [part]
        elif part is not None:
            offset += _position(part, size) * stride
            continue
        shape.append(size)
        strides.append(stride)
    return tensor.as_strided(shape, strides, offset), indices


def _position(index: Any, size: int) -> int:
    """Return an index as a non-negative number below `size`.

    Raises:
        HiddenSyncError: the index is not a number.
        IndexError: the index is out of bounds.
    """
    if not isinstance(index, (int, np.integer)) or isinstance(index, bool):
        raise HiddenSyncError(
            f"an index of type {type(index).__name__} is copied to the device, and the host waits for the copy"
        )
    position = int(index)
    if not -size <= position < size:
        raise IndexError(f"index {position} is out of bounds for a dimension of size {size}")
    return position % size


def _without_ellipsis(parts: tuple[Any, ...], num_dims: int) -> list[Any]:
    """Return the parts of a key with full slices in place of an ellipsis."""
    at = next((i for i, part in enumerate(parts) if part is Ellipsis), len(parts))
    num_given = sum(part is not None and part is not Ellipsis for part in parts)
    return [*parts[:at], *[slice(None)] * (num_dims - num_given), *parts[at + 1 :]]


def _check_index(index: Tensor) -> None:
    if index.dtype in (torch.bool, torch.uint8):
        raise HiddenSyncError("the index is a mask: the host waits for the number of its entries")
    if index.dim() == 0:
        raise HiddenSyncError("the index is a 0-dimensional tensor: the host waits for its value")
