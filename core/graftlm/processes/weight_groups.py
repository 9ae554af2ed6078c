"""The trainers' groups that the server has joined, and the weights that trainers broadcast in them."""

import asyncio
import contextlib
import logging
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from graftlm.config import EngineConfig, is_loopback
from graftlm.errors import EngineError, RequestError
from graftlm.processes.calls import ProcessCalls
from graftlm.processes.channels import AsyncInbox, Outbox, private_folder
from graftlm.processes.messages import MessageError, Reply
from graftlm.processes.os_process import ChildProcess, command_line, describe_end, device_of
from graftlm.processes.replicas import ReplicaSet
from graftlm.processes.served_weights import ServedWeights
from graftlm.processes.weight_receiver import ReceiverSetup

__all__ = ["GroupAddress", "WeightGroups"]

logger = logging.getLogger(__name__)

#: Seconds that a receiver has for its start and its answer, in addition to the time limit of the group.
_MARGIN_S: Final = 60.0
#: Seconds to wait until the receivers have freed their memory.
_FREE_TIMEOUT_S: Final = 10.0
#: The variables that select the network interfaces on which a group listens.
_INTERFACES: Final = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


class GroupAddress(msgspec.Struct, frozen=True, kw_only=True):
    """The place of the server in a group.

    Attributes:
        master_address, master_port: the TCP store of rank 0, at which all ranks meet.
        rank_offset: rank of the first replica; the others follow.
        world_size: number of ranks.
        backend: "gloo" or "nccl".
    """

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    backend: str


class WeightGroups:
    """Joins trainers' groups, and updates the weights with the tensors that are broadcast. Used by one event loop.

    Args:
        weights: replaces the weights.
    """

    def __init__(self, config: EngineConfig, weights: ServedWeights) -> None:
        self._config = config
        self._weights = weights
        self._groups: dict[str, _Group] = {}

    async def join(self, name: str, address: GroupAddress) -> None:
        """Join a group, with one rank for each replica, and wait until all ranks have joined.

        Raises:
            RequestError: there is a group with this name, the address is not allowed, or joining failed.
        """
        if name in self._groups:
            raise RequestError(f"the group {name!r} exists; destroy it first", param="group_name")
        self._check(address)
        group = self._groups[name] = _Group(self._config)
        try:
            async with group.lock:
                await group.start(address)
                await group.call("join", msgspec.to_builtins(address) | {"group_name": name}, num_waits=1)
        except BaseException:
            await self._remove(name, group)
            raise
        logger.info("joined the group %r at %s:%d", name, address.master_address, address.master_port)

    async def update(
        self,
        name: str,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        *,
        flush_cache: bool,
        abort_all: bool,
        version: str | None,
    ) -> int:
        """Receive tensors that the trainer broadcasts in this order, then replace the weights with them.

        Requests run while the tensors are being received. The tensors are received before they are checked, so that
        a refused update leaves the group usable.

        Args:
            names, dtypes, shapes: of the tensors.
            flush_cache, abort_all, version: see `ServedWeights.update`.

        Returns: number of prompts that were paused during the update.

        Raises:
            RequestError: there is no such group, a tensor did not arrive, or the weights do not fit the model. Without
                all tensors, the group is destroyed, and the weights do not change.
            UnavailableError: see `ServedWeights.update`.
        """
        group = self._named(name)
        async with group.lock:
            arguments = {"names": names, "dtypes": dtypes, "shapes": shapes}
            try:
                received, *_ = await group.call("receive", arguments, num_waits=len(names) + 1)
            except BaseException as error:
                await self._remove(name, group)
                if isinstance(error, RequestError):
                    raise RequestError(f"the weights were not changed, and the group is destroyed: {error}") from error
                raise
            try:
                return await self._weights.update(
                    None, None, flush_cache=flush_cache, abort_all=abort_all, version=version, received=received
                )
            finally:
                await group.free()

    async def destroy(self, name: str) -> None:
        """Leave a group. An update that is receiving tensors fails.

        Raises:
            RequestError: there is no such group.
        """
        await self._remove(name, self._named(name))

    def close(self) -> None:
        """End all receivers."""
        for group in self._groups.values():
            group.kill()
        self._groups.clear()

    def _named(self, name: str) -> "_Group":
        group = self._groups.get(name)
        if group is None:
            known = ", ".join(map(repr, self._groups)) or "none"
            raise RequestError(f"there is no group {name!r} (existing groups: {known})", param="group_name")
        return group

    def _check(self, address: GroupAddress) -> None:
        allowed, num_replicas = self._config.server.trainer_hosts, self._config.parallel.data
        if not (is_loopback(address.master_address) or "*" in allowed or address.master_address in allowed):
            raise RequestError(
                f"groups at {address.master_address!r} are not allowed; list the address in server.trainer_hosts",
                param="master_address",
            )
        if address.rank_offset < 1 or address.rank_offset + num_replicas > address.world_size:
            raise RequestError(
                f"the ranks {address.rank_offset} to {address.rank_offset + num_replicas - 1} of the {num_replicas} "
                f"replicas must be above 0 and below the world size {address.world_size}",
                param="rank_offset",
            )

    async def _remove(self, name: str, group: "_Group") -> None:
        if self._groups.get(name) is group:
            del self._groups[name]
        await group.close()


class _Group:
    """The receivers of one group.

    Attributes:
        lock: held while the group is joined, and while tensors are received and loaded.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.lock = asyncio.Lock()
        self._config = config
        self._folder = private_folder()
        self._names = [f"receiver-{index}" for index in range(config.parallel.data)]
        self._inbox: AsyncInbox | None = None
        self._outboxes: dict[str, Outbox] = {}
        self._processes: list[ChildProcess] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._calls = ProcessCalls(ReplicaSet(self._names, can_recover=False), self._send)

    async def start(self, address: GroupAddress) -> None:
        """Start the receivers.

        Raises:
            EngineError: a process cannot be started.
        """
        self._inbox = AsyncInbox(self._endpoint("main"))
        self._tasks.append(asyncio.create_task(self._receive(self._inbox)))
        command = command_line("graftlm.processes.weight_receiver")
        for index, name in enumerate(self._names):
            setup = msgspec.json.encode(self._setup(index, name)) + b"\n"
            try:
                process = await ChildProcess.start([*command, name], self._environment(index, address), setup)
            except OSError as error:
                raise EngineError(f"{name} cannot be started: {error}") from error
            logger.info("%s runs as pid %d", name, process.pid)
            self._processes.append(process)
            self._outboxes[name] = Outbox(self._endpoint(name))
            self._tasks.append(asyncio.create_task(self._watch(name, process)))

    async def call(self, name: str, arguments: Mapping[str, Any], *, num_waits: int) -> list[Any]:
        """Call all receivers, and return the values of their replies.

        Args:
            num_waits: number of times that a receiver may wait for the group's time limit.

        Raises:
            RequestError: a receiver failed, ended or did not answer.
        """
        limit_s = self._config.server.trainer_timeout_s
        if name == "join":
            arguments = {**arguments, "timeout_s": limit_s}
        outcomes = await self._calls.call_each(self._names, name, arguments, limit_s * num_waits + _MARGIN_S)
        failed = {name: outcome for name, outcome in outcomes.items() if isinstance(outcome, BaseException)}
        if failed:
            raise RequestError("; ".join(f"{name}: {error}" for name, error in failed.items()))
        return list(outcomes.values())

    async def free(self) -> None:
        """Free the memory of the received tensors."""
        await self._calls.call_each(self._names, "free", {}, _FREE_TIMEOUT_S)

    async def close(self) -> None:
        """End the receivers, and wait until they have ended."""
        self.kill()
        await asyncio.gather(*[process.wait() for process in self._processes])

    def kill(self) -> None:
        """End the receivers. A blocked call of `torch.distributed` cannot be ended in another way."""
        for process in self._processes:
            process.kill()
        for name in self._names:
            self._calls.process_died(name, "the group was destroyed")
        for task in self._tasks:
            task.cancel()
        for outbox in self._outboxes.values():
            outbox.close(deliver=False)
        self._outboxes.clear()
        if self._inbox is not None:
            self._inbox.close()
            self._inbox = None
        shutil.rmtree(self._folder, ignore_errors=True)

    def _send(self, name: str, message: Any) -> None:
        outbox = self._outboxes.get(name)
        if outbox is None:
            raise RequestError("the group was destroyed")
        outbox.send(message)

    async def _receive(self, inbox: AsyncInbox) -> None:
        while True:
            with contextlib.suppress(MessageError):
                message = await inbox.receive()
                if isinstance(message, Reply):
                    self._calls.answer(message)

    async def _watch(self, name: str, process: ChildProcess) -> None:
        end = describe_end(await process.wait())
        logger.error("%s (pid %d) ended: %s", name, process.pid, end)
        self._calls.process_died(
            name,
            f"the process ended ({end}); this happens if a tensor was broadcast with another dtype or shape than given",
        )

    def _endpoint(self, name: str) -> str:
        return f"ipc://{self._folder}/{name}"

    def _setup(self, index: int, name: str) -> ReceiverSetup:
        return ReceiverSetup(
            name=name,
            index=index,
            endpoint=self._endpoint(name),
            main=self._endpoint("main"),
            sys_path=sys.path,
            log_format=self._config.server.log_format,
            log_level=self._config.server.log_level,
        )

    def _environment(self, index: int, address: GroupAddress) -> dict[str, str]:
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        if self._config.parallel.data > 1 and self._config.model.device != "cpu":
            environment["CUDA_VISIBLE_DEVICES"] = device_of(index, environment)
        if is_loopback(address.master_address) and sys.platform.startswith("linux"):
            for variable in _INTERFACES:  # the group must not listen on other interfaces
                environment.setdefault(variable, "lo")
        return environment
