"""A process that is one rank of a trainer's group (`torch.distributed`), and receives the tensors that are broadcast.

A collective call with a wrong size ends its process, and a call can block until its time limit. Therefore the
schedulers do not join the group. Each replica has one receiver, which starts with its own interpreter and is never
forked. The first receiver keeps the tensors in shared memory (memfd), from which all schedulers copy; the other
receivers discard them.
"""

import logging
import mmap
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, cast

import msgspec

from graftlm.errors import GraftlmError, RequestError
from graftlm.logs import configure_logging
from graftlm.processes.channels import Inbox, Outbox, deliver_all
from graftlm.processes.child import end_with_main
from graftlm.processes.messages import Call, Reply, Shutdown

if TYPE_CHECKING:
    from torch import Tensor

    from graftlm.checkpoint.tensor_memory import TensorPlace

__all__ = ["ReceiverSetup", "WeightReceiver", "main"]

logger = logging.getLogger(__name__)

#: The rank of the trainer, which broadcasts.
_TRAINER_RANK: Final = 0
#: Content of the last bytes of a tensor before it is received. In every floating dtype, this is NaN.
_NOT_RECEIVED: Final = 0xFF


class ReceiverSetup(msgspec.Struct, frozen=True, kw_only=True):
    """The setup of a receiver, which main sends as one line of JSON.

    Attributes:
        name: name of this process in messages.
        index: index of the replica.
        endpoint: address at which the process receives messages.
        main: address to which it sends messages.
        sys_path: main's `sys.path`.
        log_format: `server.log_format`.
        log_level: `server.log_level`.
    """

    name: str
    index: int
    endpoint: str
    main: str
    sys_path: list[str]
    log_format: Literal["text", "json"]
    log_level: str


class WeightReceiver:
    """Joins a group, and receives tensors. All calls run in one thread.

    Args:
        index: index of the replica. Only receiver 0 keeps the tensors.
    """

    def __init__(self, index: int) -> None:
        self._index = index
        self._group: Any = None
        self._device = "cpu"
        self._timeout = timedelta()
        self._memory: mmap.mmap | None = None
        self._file: int | None = None

    def join(
        self,
        master_address: str,
        master_port: int,
        rank_offset: int,
        world_size: int,
        group_name: str,
        backend: str,
        timeout_s: float,
    ) -> None:
        """Join a group, and wait until all ranks have joined.

        Args:
            rank_offset: rank of receiver 0.
            timeout_s: time limit for joining, and later for each tensor.

        Raises:
            RequestError: the backend is not available, or not all ranks have joined in time.
        """
        import torch
        from torch.distributed import distributed_c10d as c10d
        from torch.distributed.rendezvous import rendezvous

        if backend == "nccl" and not (torch.cuda.is_available() and c10d.is_nccl_available()):
            raise RequestError("the backend nccl needs a CUDA device, and there is none; use gloo")
        self._timeout = timedelta(seconds=timeout_s)
        self._device = "cuda" if backend == "nccl" else "cpu"
        rank = rank_offset + self._index
        host = f"[{master_address}]" if ":" in master_address and "[" not in master_address else master_address
        try:
            # The calls and the prefix are those of SGLang's clients. A public function would use another prefix.
            found = rendezvous(f"tcp://{host}:{master_port}", rank, world_size, timeout=self._timeout)
            store, rank, world_size = next(found)
            store.set_timeout(self._timeout)
            self._group, _ = c10d._new_process_group_helper(
                world_size,
                rank,
                [],
                c10d.Backend(backend),
                c10d.PrefixStore(group_name, store),
                group_name=cast(Any, group_name),  # a type of its own in recent versions
                timeout=self._timeout,
            )
        except (RuntimeError, ValueError) as error:
            raise RequestError(
                f"rank {rank} of {world_size} could not join the group at {master_address}:{master_port} within "
                f"{timeout_s:g} s: {_first_line(error)}"
            ) from error

    def receive(self, names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]]) -> dict[str, Any]:
        """Receive tensors that rank 0 broadcasts, one after another.

        Returns: the arguments of `map_tensors`, by name. The memory is valid until `free`.

        Raises:
            RequestError: an argument is not valid, there is too little memory, or a tensor did not arrive.
        """
        import psutil

        from graftlm.checkpoint.tensor_memory import place_tensors, tensor_at

        places, num_bytes = place_tensors(names, dtypes, shapes)
        available = psutil.virtual_memory().available
        if self._index == 0 and num_bytes > available:
            raise RequestError(
                f"the tensors have {num_bytes:,} bytes, but the machine has only {available:,} bytes of free memory; "
                "send them in several calls"
            )
        self.free()
        memory = self._allocate(num_bytes) if self._index == 0 and num_bytes else None
        for place in places:
            self._receive_one(place, None if memory is None else tensor_at(memory, place))
        return {"path": "" if memory is None else f"/proc/{os.getpid()}/fd/{self._file}", "places": places}

    def free(self) -> None:
        """Free the memory of the received tensors."""
        self._memory = None  # unmapped when the last tensor in it is deleted
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _allocate(self, num_bytes: int) -> mmap.mmap:
        if not hasattr(os, "memfd_create"):
            raise RequestError("weights can be received from a group on Linux only")
        self._file = os.memfd_create("graftlm-weights")
        os.ftruncate(self._file, num_bytes)
        self._memory = mmap.mmap(self._file, num_bytes)
        return self._memory

    def _receive_one(self, place: "TensorPlace", kept: "Tensor | None") -> None:
        """Receive a tensor.

        Args:
            kept: where the tensor is stored; None: it is discarded.
        """
        import torch

        from graftlm.checkpoint.tensor_memory import parse_dtype

        name, dtype, shape, _ = place
        direct = kept is not None and self._device == "cpu"
        target = kept if direct else torch.empty(shape, dtype=parse_dtype(dtype), device=self._device)
        assert target is not None
        last = target.view(-1)[-1:].view(torch.uint8)
        last.fill_(_NOT_RECEIVED)
        try:
            self._group.broadcast(target, _TRAINER_RANK).wait(self._timeout)
        except RuntimeError as error:
            raise RequestError(f"the tensor {name!r} did not arrive: {_first_line(error)}") from error
        if len(last) and bool((last == _NOT_RECEIVED).all()):
            raise RequestError(
                f"the tensor {name!r} did not arrive completely (or ends with NaN): was it broadcast with the dtype "
                f"{dtype} and the shape {shape}?"
            )
        if kept is not None and not direct:
            kept.copy_(target)


def run(receiver: WeightReceiver, name: str, inbox: Inbox, to_main: Outbox) -> None:
    """Answer calls until Shutdown."""
    calls: Mapping[str, Callable[..., Any]] = {
        "join": receiver.join,
        "receive": receiver.receive,
        "free": receiver.free,
    }
    while True:
        for message in inbox.receive(None):
            if isinstance(message, Shutdown):
                return
            if not isinstance(message, Call):
                logger.error("%s cannot handle a message of type %s", name, type(message).__name__)
                continue
            value, error = None, None
            try:
                value = calls[message.name](**message.arguments)
            except Exception as failure:
                if not isinstance(failure, GraftlmError):
                    logger.exception("%s failed", message.name)
                error = str(failure) or type(failure).__name__
            to_main.send(Reply(process=name, call_id=message.call_id, value=value, error=error))


def main() -> None:
    """Read the setup from standard input and run the process, which ends without the destructors of a group."""
    stdin = sys.stdin.buffer
    setup = msgspec.json.decode(stdin.readline(), type=ReceiverSetup)
    sys.path[:] = setup.sys_path
    configure_logging(setup.log_format, setup.log_level, setup.name)
    end_with_main(stdin, Path(setup.endpoint.removeprefix("ipc://")).parent)
    run(WeightReceiver(setup.index), setup.name, Inbox(setup.endpoint), Outbox(setup.main))
    deliver_all()
    logging.shutdown()
    os._exit(0)


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__


if __name__ == "__main__":
    main()
