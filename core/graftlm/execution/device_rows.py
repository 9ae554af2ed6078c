"""Reads and writes rows of device tensors by host indices, without synchronization."""

from typing import Any

from numpy.typing import NDArray
from torch import Tensor

from graftlm.execution.batch import to_device

__all__ = ["put_rows", "take_rows"]


def take_rows(tensor: Tensor, rows: NDArray[Any]) -> Tensor:
    """Return rows of a tensor. If all rows are selected, return the tensor itself, else a copy.

    Args:
        tensor: [n, ...].
        rows: int64 [m], ascending, unique.
    """
    if len(rows) == len(tensor):
        return tensor
    return tensor.index_select(0, to_device(rows, tensor.device))


def put_rows(tensor: Tensor, rows: NDArray[Any], values: Tensor) -> Tensor:
    """Replace rows in place, and return the tensor. If all rows are selected, return `values` instead.

    Args:
        tensor: [n, ...].
        rows: int64 [m], ascending, unique.
        values: [m, ...], of the tensor's dtype.
    """
    if len(rows) == len(tensor):
        return values
    return tensor.index_copy_(0, to_device(rows, tensor.device), values)
