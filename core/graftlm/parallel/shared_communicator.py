"""The communicator of the processes of one machine that exchanges CPU tensors through shared memory."""

import ctypes
import logging
import mmap
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Literal

import torch
from torch import Tensor

from graftlm.contracts import Communicator
from graftlm.errors import RankFailedError
from graftlm.layers import call_native
from graftlm.layers.kernel_build import KernelBuildError, load_library

__all__ = ["SharedCommunicator", "join_shared_memory"]

_logger = logging.getLogger(__name__)

_SOURCE = Path(__file__).with_name("shared_memory.cpp")
_ADDRESS, _SIZE = ctypes.c_void_p, ctypes.c_int64
#: Size in bytes of each of a rank's two buffers. Larger tensors are exchanged in several parts.
_CAPACITY: Final = 1 << 20
_SIGNATURES: Final[dict[str, tuple[list[Any], Any]]] = {
    "bytes": ([_SIZE, _SIZE], _SIZE),
    "join": ([_ADDRESS, _SIZE, _SIZE, _SIZE, _SIZE], _ADDRESS),
    "leave": ([_ADDRESS], None),
    "set_timeout": ([_ADDRESS, _SIZE], None),
    "culprit": ([_ADDRESS], _SIZE),
    "sum_float32": ([_ADDRESS, _ADDRESS, _SIZE], _SIZE),
    "sum_bfloat16": ([_ADDRESS, _ADDRESS, _SIZE], _SIZE),
    "gather": ([_ADDRESS, _ADDRESS, _ADDRESS, _SIZE], _SIZE),
    "broadcast": ([_ADDRESS, _ADDRESS, _SIZE, _SIZE], _SIZE),
}
_NS_PER_S: Final = 1e9


class SharedCommunicator(Communicator):
    """Adds up, gathers and broadcasts tensors through shared memory; another communicator does everything else.

    Sums are added in the order of the ranks, in float32. A wait spins for about 20 µs, then yields the core, then
    sleeps between looks. It ends at the deadline, and when the process of a rank has ended.

    Args:
        others: the communicator for other operations, dtypes and devices, over the same ranks.
        library: the library compiled from shared_memory.cpp.
        memory: the shared memory, of `shared_bytes(library, size)`.
    """

    def __init__(self, others: Communicator, library: ctypes.CDLL, memory: mmap.mmap) -> None:
        self.rank = others.rank
        self.size = others.size
        self._others = others
        self._functions = {name: _function(library, name) for name in _SIGNATURES}
        self._memory = memory  # stays mapped as long as this object exists
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self._group: int | None = self._functions["join"](
            address, self.rank, self.size, _CAPACITY, int(others.timeout_s * _NS_PER_S)
        )
        self._sums = {
            torch.float32: self._functions["sum_float32"],
            torch.bfloat16: self._functions["sum_bfloat16"],
        }

    @property
    def timeout_s(self) -> float:
        """Deadline of every call, in seconds from its start."""
        return self._others.timeout_s

    @timeout_s.setter
    def timeout_s(self, value: float) -> None:
        self._others.timeout_s = value
        self._functions["set_timeout"](self._group, int(value * _NS_PER_S))

    @property
    def repeats_calls(self) -> bool:
        """Always true: sums are calls of a kernel, which recorded steps repeat."""
        return True

    def all_reduce(self, tensor: Tensor, operation: Literal["sum", "min", "max"] = "sum") -> Tensor:
        """Replace a tensor by the sum, minimum or maximum over all ranks; see the contract."""
        add = self._sums.get(tensor.dtype)
        if add is None or operation != "sum" or not tensor.is_contiguous() or tensor.is_cuda:
            return self._others.all_reduce(tensor, operation)
        self._check("all_reduce", call_native(add, self._joined(), tensor.data_ptr(), tensor.numel()))
        return tensor

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Return the tensors of all ranks; see the contract."""
        tensor = tensor.contiguous()
        out = tensor.new_empty((self.size, *tensor.shape))
        gather = self._functions["gather"]
        self._check("all_gather", gather(self._joined(), tensor.data_ptr(), out.data_ptr(), tensor.nbytes))
        return out

    def broadcast(self, tensor: Tensor, rank: int) -> Tensor:
        """Replace a tensor by that of a rank; see the contract."""
        if not tensor.is_contiguous():
            return self._others.broadcast(tensor, rank)
        broadcast = self._functions["broadcast"]
        self._check("broadcast", broadcast(self._joined(), tensor.data_ptr(), tensor.nbytes, rank))
        return tensor

    def reduce_scatter(self, tensor: Tensor) -> Tensor:
        """Return the sum of this rank's parts; see the contract."""
        self._joined()
        return self._others.reduce_scatter(tensor)

    def all_to_all(self, tensor: Tensor, num_sent: Sequence[int], num_received: Sequence[int]) -> Tensor:
        """Send rows to each rank, and return the received rows; see the contract."""
        self._joined()
        return self._others.all_to_all(tensor, num_sent, num_received)

    def send(self, tensor: Tensor, rank: int) -> None:
        """Send a tensor; see the contract."""
        self._joined()
        self._others.send(tensor, rank)

    def receive(self, tensor: Tensor, rank: int) -> Tensor:
        """Receive a tensor; see the contract."""
        self._joined()
        return self._others.receive(tensor, rank)

    def close(self) -> None:
        """Leave the group. Recorded steps must not be repeated afterwards."""
        if self._group is not None:
            self._functions["leave"](self._group)
            self._group = None
        self._others.close()

    def _joined(self) -> int:
        if self._group is None:
            raise RankFailedError(f"the communicator of rank {self.rank} is closed")
        return self._group

    def _check(self, name: str, status: int) -> None:
        if status:
            culprit = self._functions["culprit"](self._group)
            reason = "has ended" if status == 2 else f"made no matching call within {self.timeout_s:g} s"
            raise RankFailedError(f"rank {self.rank} of {self.size}: {name} failed: rank {culprit} {reason}")


def _function(library: ctypes.CDLL, name: str) -> Any:
    function = getattr(library, f"graftlm_shared_{name}")
    function.argtypes, function.restype = _SIGNATURES[name]
    return function


def join_shared_memory(others: Communicator, path: Path, compiler: str, cache_dir: Path) -> Communicator:
    """Return a communicator that uses shared memory, or `others` if this is not possible. All ranks call it.

    Args:
        others: a communicator of CPU tensors over the same ranks.
        path: the file of the shared memory, in a folder of all ranks. It is removed before this call returns.
        compiler, cache_dir: see `load_library`.

    Effects: logs the reason why shared memory is not used.
    """
    library: ctypes.CDLL | None = None
    try:
        library = load_library(_SOURCE, compiler, cache_dir)
    except KernelBuildError as error:
        _logger.info("ranks exchange tensors without shared memory: %s", error)
    if not _all_can(others, library is not None) or library is None:
        return others
    num_bytes = _function(library, "bytes")(others.size, _CAPACITY)
    try:
        if others.rank == 0:
            with path.open("xb") as file:
                os.posix_fallocate(file.fileno(), 0, num_bytes)
        exists = True
    except OSError as error:
        _logger.info("ranks exchange tensors without shared memory: %d bytes cannot be allocated: %s", num_bytes, error)
        exists = False
    if _all_can(others, exists):
        with path.open("r+b") as file:
            memory = mmap.mmap(file.fileno(), num_bytes)
        joined = SharedCommunicator(others, library, memory)
        _all_can(others, True)  # all ranks have joined
    else:
        joined = None
    if others.rank == 0:
        path.unlink(missing_ok=True)
    return others if joined is None else joined


def _all_can(communicator: Communicator, can: bool) -> bool:
    return bool(communicator.all_reduce(torch.tensor([int(can)]), "min").item())
