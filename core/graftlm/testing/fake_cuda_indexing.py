"""Indexing of tensors on a fake CUDA device, by the operations that PyTorch's indexing consists of.

PyTorch's own indexing needs a device guard, which a build without CUDA lacks.
"""

from typing import Any

import torch
from torch import Tensor

from graftlm.testing.fake_cuda_errors import HiddenSyncError

__all__ = ["read_index", "write_index"]

_END = 2**63 - 1


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
    view, indices = _view(tensor, key)
    target = torch.ops.aten.index.Tensor(view, indices) if indices else view
    if isinstance(value, Tensor):
        value.expand(target.shape) if value.dim() <= target.dim() else value.view(target.shape)


def _view(tensor: Tensor, key: Any) -> tuple[Tensor, list[Tensor | None]]:
    """Return the view that a key's numbers and slices choose, and its tensors by dimension of the view."""
    parts = _without_ellipsis(key if isinstance(key, tuple) else (key,), tensor.dim())
    indices: list[Tensor | None] = []
    dim = 0  # of the view, that the next part indexes
    for part in parts:
        if part is None:
            tensor = tensor.unsqueeze(dim)
        elif isinstance(part, slice):
            stop = _END if part.stop is None else part.stop
            tensor = torch.ops.aten.slice.Tensor(tensor, dim, part.start, stop, part.step or 1)
        elif isinstance(part, Tensor):
            _check_index(part)
            indices += [None] * (dim - len(indices)) + [part]
        elif hasattr(part, "__index__") and not isinstance(part, bool):
            tensor = tensor.select(dim, int(part))
            continue
        else:
            raise HiddenSyncError(f"an index of type {type(part).__name__} is copied to the device and waited for")
        dim += 1
    return tensor, indices


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
