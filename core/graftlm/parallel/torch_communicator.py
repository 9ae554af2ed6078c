"""The communicator over a process group of torch.distributed: gloo for a CPU, NCCL for CUDA devices."""

import re
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import Store

from graftlm.contracts import Communicator
from graftlm.errors import RankFailedError

__all__ = ["TorchCommunicator", "file_store"]

_OPERATIONS: Final = {"sum": dist.ReduceOp.SUM, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}
#: The tag of all point-to-point messages; their order is that of the calls.
_TAG: Final = 0


def file_store(path: Path, size: int) -> Store:
    """Return a store in a file at which the ranks of one machine meet. The file is created if necessary."""
    create: Any = dist.FileStore  # type: ignore[attr-defined]  # torch's annotations lack this name
    store: Store = create(str(path), size)
    return store


class TorchCommunicator(Communicator):
    """A communicator that owns its process group, so that a process may have several.

    Args:
        store: the store at which the ranks meet. It must exist as long as the communicator.
        rank, size: place of this rank, and number of ranks.
        device: device of the tensors.
        timeout_s: deadline of every call, in seconds.

    Raises:
        RankFailedError: not all ranks came to the store before the deadline.
    """

    def __init__(self, store: Store, rank: int, size: int, device: torch.device, timeout_s: float) -> None:
        self.rank = rank
        self.size = size
        self.timeout_s = timeout_s
        self._failure: RankFailedError | None = None
        timeout = timedelta(seconds=timeout_s)
        try:
            self._group: Any = (_gloo if device.type == "cpu" else _nccl)(store, rank, size, timeout)
        except RuntimeError as error:
            raise RankFailedError(f"rank {rank} did not meet the other {size - 1} ranks: {_line(error)}") from error

    def all_reduce(self, tensor: Tensor, operation: Literal["sum", "min", "max"] = "sum") -> Tensor:
        """Replace a tensor by the sum, minimum or maximum over all ranks; see the contract."""
        options: Any = dist.AllreduceOptions()
        options.reduceOp = _OPERATIONS[operation]
        self._run("all_reduce", options, lambda: self._group.allreduce([tensor], options))
        return tensor

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Return the tensors of all ranks; see the contract."""
        out = tensor.new_empty((self.size, *tensor.shape))
        whole, part = out.view(-1), tensor.reshape(-1)
        self._run("all_gather", None, lambda: self._group._allgather_base(whole, part))
        return out

    def reduce_scatter(self, tensor: Tensor) -> Tensor:
        """Return the sum of this rank's parts; see the contract."""
        out = tensor.new_empty(tensor.shape[1:])
        options: Any = dist.ReduceScatterOptions()
        whole, part = tensor.reshape(-1), out.view(-1)
        self._run("reduce_scatter", options, lambda: self._group._reduce_scatter_base(part, whole, options))
        return out

    def all_to_all(self, tensor: Tensor, num_sent: Sequence[int], num_received: Sequence[int]) -> Tensor:
        """Send rows to each rank, and return the received rows; see the contract."""
        out = tensor.new_empty((sum(num_received), *tensor.shape[1:]))
        options: Any = dist.AllToAllOptions()
        sent, received = list(num_sent), list(num_received)
        self._run("all_to_all", options, lambda: self._group.alltoall_base(out, tensor, received, sent, options))
        return out

    def send(self, tensor: Tensor, rank: int) -> None:
        """Send a tensor; see the contract."""
        self._run("send", None, lambda: self._group.send([tensor], rank, _TAG))

    def receive(self, tensor: Tensor, rank: int) -> Tensor:
        """Receive a tensor; see the contract."""
        self._run("receive", None, lambda: self._group.recv([tensor], rank, _TAG))
        return tensor

    def broadcast(self, tensor: Tensor, rank: int) -> Tensor:
        """Replace a tensor by that of a rank; see the contract."""
        options: Any = dist.BroadcastOptions()
        options.rootRank = rank
        self._run("broadcast", options, lambda: self._group.broadcast([tensor], options))
        return tensor

    def close(self) -> None:
        """Leave the group; connections close when the last reference to the group is dropped."""
        self._failure = self._failure or RankFailedError(f"the communicator of rank {self.rank} is closed")
        self._group = None

    def _run(self, name: str, options: Any, start: Any) -> None:
        """Start an operation and wait for it. On a GPU, only the current stream waits."""
        if self._failure is not None:
            raise self._failure
        timeout = timedelta(seconds=self.timeout_s)
        if options is not None:
            options.timeout = timeout
        try:
            start().wait(timeout)
        except RuntimeError as error:
            self._failure = RankFailedError(f"rank {self.rank} of {self.size}: {name} failed: {_line(error)}")
            raise self._failure from error


def _gloo(store: Store, rank: int, size: int, timeout: timedelta) -> Any:
    """Return a gloo group on the loopback interface."""
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname="127.0.0.1")]
    options._timeout = timeout
    return gloo(store, rank, size, options)


def _nccl(store: Store, rank: int, size: int, timeout: timedelta) -> Any:
    nccl: Any = dist.ProcessGroupNCCL
    options = nccl.Options()
    options._timeout = timeout
    return nccl(store, rank, size, options)


def _line(error: Exception) -> str:
    """Return the first sentence of an error, without the place in torch's source."""
    line = str(error).partition("\n")[0].partition(". This is")[0]
    return re.sub(r"^\[[^\]]*\] ", "", line)
