"""The loop of a rank, which receives plans, runs them and sends results."""

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue

import msgspec
import numpy as np
import zmq
from numpy.typing import NDArray

from graftlm.errors import EngineError, GraftlmError, RankFailedError
from graftlm.execution.executor import Launched
from graftlm.parallel import protocol
from graftlm.parallel.wire import PlanDecoder, encode_result
from graftlm.parallel.worker import RankWorker
from graftlm.plan import LateMask, StepPlan, TokenMask

__all__ = ["RankLoop"]


class RankLoop:
    """Runs the messages of a scheduler in their order, until it is stopped.

    On a CPU, a step ends before the next message is read. On a GPU, a second thread waits for the results, so that the
    next step is launched in the meantime.

    Args:
        rank: index of this rank. Only rank 0 sends results.
        worker: runs plans and operations.
        inbox: bound PULL socket.
        send: sends a message to the scheduler; any thread may call it.
        timeout_s: deadline of a token mask, in seconds.
        fail: on a GPU, function that ends the process because of an error in the second thread; None for a CPU.
    """

    def __init__(
        self,
        rank: int,
        worker: RankWorker,
        inbox: "zmq.Socket[bytes]",
        send: Callable[[list[bytes]], None],
        timeout_s: float,
        *,
        fail: Callable[[Exception], None] | None,
    ) -> None:
        self._rank = rank
        self._worker = worker
        self._inbox = inbox
        self._send = send
        self._timeout_s = timeout_s
        self._plans = PlanDecoder()
        self._deferred: deque[list[bytes]] = deque()  # messages that arrived while a step waited for its mask
        self._cancelled: set[int] = set()
        self._waiter = None if fail is None else _Waiter(self._send_result, fail)
        self.during = "waiting"

    def run(self) -> None:
        """Run messages until STOP arrives.

        Raises:
            Exception: a step or an operation failed; the rank cannot continue.
        """
        while True:
            kind, *frames = self._deferred.popleft() if self._deferred else self._inbox.recv_multipart()
            if kind == protocol.PLAN:
                self._run_plan(self._plans.decode(frames))
            elif kind == protocol.CALL:
                self._call(protocol.decode(frames[0], protocol.Call))
            elif kind == protocol.STOP:
                break
            self.during = "waiting"
        if self._waiter is not None:
            self._waiter.close()

    def _run_plan(self, plan: StepPlan) -> None:
        self.during = f"step {plan.step_id}"
        if plan.token_mask is not None:
            mask = _AwaitedMask(plan.token_mask.idx, loop=self, step_id=plan.step_id) if self._rank == 0 else None
            plan = msgspec.structs.replace(plan, token_mask=mask)
        launched = self._worker.runner.launch(plan)
        if self._waiter is not None:
            self._waiter.put(plan.step_id, launched)
        else:
            self._send_result(plan.step_id, launched)

    def _send_result(self, step_id: int, launched: Launched) -> None:
        result = launched.result()
        if self._rank != 0:
            return
        if step_id in self._cancelled:
            self._cancelled.discard(step_id)
            self._send([protocol.CANCELLED, protocol.encode(protocol.StepId(step_id))])
        else:
            self._send([protocol.RESULT, encode_result(step_id, result)])

    def await_mask(self, step_id: int, num_masks: int) -> NDArray[np.int32] | None:
        """Wait for the bits of a step's mask, int32 [M, W]; None if they were cancelled.

        Raises:
            RankFailedError: the bits did not arrive before the deadline.
        """
        deadline_s = time.monotonic() + self._timeout_s
        while (left_s := deadline_s - time.monotonic()) > 0:
            if not self._inbox.poll(int(left_s * 1000) + 1):
                break
            message = self._inbox.recv_multipart()
            if message[0] == protocol.MASK and protocol.decode(message[1], protocol.StepId).step_id == step_id:
                return np.frombuffer(bytearray(message[2]), dtype=np.int32).reshape(num_masks, -1)
            if message[0] == protocol.CANCEL and protocol.decode(message[1], protocol.StepId).step_id == step_id:
                self._cancelled.add(step_id)
                return None
            self._deferred.append(message)
        raise RankFailedError(f"the token mask of step {step_id} did not arrive within {self._timeout_s:g} s")

    def _call(self, call: protocol.Call) -> None:
        self.during = call.operation
        if self._waiter is not None:
            self._waiter.drain()
        try:
            value = self._worker.call(call.operation, call.arguments)
            answer = protocol.Answer(self._rank, call.call_id, value)
        except EngineError:  # the group may be in different states
            raise
        except GraftlmError as error:
            answer = protocol.Answer(self._rank, call.call_id, error=(type(error).__name__, str(error)))
        self._send([protocol.ANSWER, protocol.encode(answer)])


@dataclass(frozen=True, slots=True, kw_only=True)
class _AwaitedMask(LateMask):
    """A token mask that arrives as a message while the step waits for it.

    If the mask is cancelled, the step samples without it, so that it ends as usual on all ranks. Its result is dropped.
    """

    loop: RankLoop
    step_id: int

    def wait(self) -> TokenMask | None:
        bits = self.loop.await_mask(self.step_id, len(self.idx))
        return None if bits is None else TokenMask(self.idx, bits)


class _Waiter:
    """A thread that waits for launched steps in their order, and sends their results."""

    def __init__(self, send: Callable[[int, Launched], None], fail: Callable[[Exception], None]) -> None:
        self._send = send
        self._fail = fail
        self._steps: SimpleQueue[tuple[int, Launched] | threading.Event | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="graftlm-wait", daemon=True)
        self._thread.start()

    def put(self, step_id: int, launched: Launched) -> None:
        self._steps.put((step_id, launched))

    def drain(self) -> None:
        """Wait until all results have been sent."""
        event = threading.Event()
        self._steps.put(event)
        event.wait()

    def close(self) -> None:
        self._steps.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (step := self._steps.get()) is not None:
            if isinstance(step, threading.Event):
                step.set()
                continue
            try:
                self._send(*step)
            except Exception as error:
                self._fail(error)
