"""The executor that sends plans to the processes of several ranks."""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Final, TypeVar

import zmq

from graftlm import errors
from graftlm.contracts import Outcome, RankProcesses, StepExecutor
from graftlm.errors import EngineError, GraftlmError, RankFailedError
from graftlm.parallel import protocol
from graftlm.parallel.wire import decode_result, encode_plan
from graftlm.plan import LateMask, StepPlan, StepResult

__all__ = ["RankGroup"]

logger = logging.getLogger(__name__)

T = TypeVar("T")

#: Milliseconds between two checks whether the processes still run, while the scheduler waits for a message.
_POLL_MS: Final = 50
#: Seconds between two checks of the thread that watches the processes while no step runs.
_WATCH_S: Final = 0.25
#: Seconds to wait for the last messages of other ranks after one has failed.
_LAST_WORDS_S: Final = 0.5
#: Seconds to wait for the end of the processes before they are killed.
_STOP_S: Final = 5.0


class RankGroup(StepExecutor):
    """Sends each plan to all ranks, and receives the results of rank 0.

    A plan is encoded once. Its mask follows as soon as it is filled, or a message that it was cancelled. If a rank
    ends, raises or does not answer before the deadline, all processes are ended, and all outcomes raise the same error.

    Args:
        processes: the processes of the ranks.
        inbox: address at which this object receives messages.
        outboxes: address of each rank.
        timeout_s: deadline of a step, in seconds from the end of the previous step.
        start_timeout_s: deadline for the start of all ranks.
        on_stage: function that is called with the stages of the start.

    Attributes:
        infos: properties of each rank.
    """

    def __init__(
        self,
        processes: RankProcesses,
        inbox: str,
        outboxes: Sequence[str],
        *,
        timeout_s: float,
        start_timeout_s: float,
        on_stage: Callable[[str], None],
    ) -> None:
        self._processes = processes
        self._timeout_s = timeout_s
        self._on_stage = on_stage
        self._context: zmq.Context[Any] = zmq.Context()
        self._inbox: zmq.Socket[bytes] = self._context.socket(zmq.PULL)
        self._inbox.set_hwm(0)
        self._outboxes = [self._connected(endpoint) for endpoint in outboxes]
        self._results: dict[int, StepResult | BaseException] = {}
        self._answers: dict[int, dict[int, protocol.Answer]] = {}
        self._waiting: dict[int, None] = {}  # ids of the steps without a result, in their order
        self._failures: dict[int, str] = {}
        self._num_calls = 0
        self._failure: RankFailedError | None = None
        self._callback: Callable[[], None] | None = None
        self._is_closed = threading.Event()
        self._has_ended = threading.Event()  # a process has ended while no step ran
        self._ready: dict[int, Mapping[str, Any]] = {}
        self._refusal: GraftlmError | None = None  # the error of a configuration or checkpoint that ranks refuse
        self.infos: list[Mapping[str, Any]] = []
        self._inbox.bind(inbox)
        self._start(start_timeout_s)

    def _connected(self, endpoint: str) -> "zmq.Socket[bytes]":
        socket: zmq.Socket[bytes] = self._context.socket(zmq.PUSH)
        socket.set_hwm(0)
        socket.connect(endpoint)
        return socket

    def _start(self, timeout_s: float) -> None:
        size = len(self._outboxes)
        try:
            self._receive_until(lambda: len(self._ready) == size, timeout_s, "the start")
        except RankFailedError as error:
            self._stop_processes()
            self._context.destroy(linger=0)
            raise self._refusal or error from None
        self.infos = [self._ready[rank] for rank in range(size)]
        for rank, info in enumerate(self.infos):
            logger.info("rank %d of %d runs as %s: %s", rank, size, self._processes.place(rank), info["summary"])
        threading.Thread(target=self._watch, name="graftlm-ranks", daemon=True).start()

    # -- StepExecutor --------------------------------------------------------------------------------------------------

    @property
    def failure(self) -> RankFailedError | None:
        """The reason why the group has ended; None while it runs."""
        if self._failure is None and self._has_ended.is_set():
            with contextlib.suppress(RankFailedError):
                self._fail()
        return self._failure

    def when_failed(self, callback: Callable[[], None]) -> None:
        """Set a function that is called, from any thread, when the group has ended."""
        self._callback = callback
        if self._failure is not None or self._has_ended.is_set():
            callback()

    def submit(self, plan: StepPlan) -> Outcome[StepResult]:
        """Send a plan to all ranks."""
        outcome = _StepOutcome(self, plan.step_id)
        if self._failure is not None:
            return outcome
        self._send([protocol.PLAN, *encode_plan(plan)])
        self._waiting[plan.step_id] = None
        if plan.token_mask is not None:
            self._follow(plan.step_id, plan.token_mask)
        return outcome

    def call(self, function: Callable[[], T]) -> Outcome[T]:
        """Wait for the submitted steps, then run a function."""
        future: Future[T] = Future()
        try:
            self._receive_until(lambda: not self._waiting, self._timeout_s, "a step")
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)
        return future

    def close(self) -> None:
        """Wait for the submitted steps, and end all processes."""
        if self._failure is None and not self._is_closed.is_set():
            try:
                self._receive_until(lambda: not self._waiting, self._timeout_s, "the last steps")
                self._is_closed.set()
                self._send([protocol.STOP])
            except RankFailedError as error:
                logger.error("%s", error)
        self._is_closed.set()
        self._stop_processes()
        self._context.destroy(linger=0)

    # -- operations ----------------------------------------------------------------------------------------------------

    def request(self, operation: str, arguments: Mapping[str, Any], timeout_s: float | None = None) -> list[Any]:
        """Run an operation of the workers after the submitted steps, and return each rank's value.

        Args:
            arguments: plain data.
            timeout_s: deadline; None: that of a step.

        Raises:
            GraftlmError: the operation was refused by a rank; no rank ends.
            RankFailedError: a rank failed.
        """
        if self._failure is not None:
            raise self._failure
        self._num_calls += 1
        call_id = self._num_calls
        answers = self._answers.setdefault(call_id, {})
        self._send([protocol.CALL, protocol.encode(protocol.Call(call_id, operation, dict(arguments)))])
        size = len(self._outboxes)
        self._receive_until(lambda: len(answers) == size, timeout_s or self._timeout_s, operation)
        del self._answers[call_id]
        for rank in range(size):
            if (error := answers[rank].error) is not None:
                raise _error_named(*error)
        return [answers[rank].value for rank in range(size)]

    # -- messages ------------------------------------------------------------------------------------------------------

    def result_of(self, step_id: int) -> StepResult:
        """Wait for a step's result.

        Raises:
            RankFailedError: the group has ended.
            EngineError: the step's mask was cancelled.
        """
        if step_id not in self._results:
            self._receive_until(lambda: step_id in self._results, self._timeout_s, f"step {step_id}")
        found = self._results.pop(step_id)
        if isinstance(found, BaseException):
            raise found
        return found

    def _follow(self, step_id: int, mask: LateMask) -> None:
        """Send the bits of a mask to rank 0 when they are filled, or a message when they are cancelled."""

        def send(bits: "Future[Any]") -> None:
            if self._failure is not None or self._is_closed.is_set():
                return
            body = protocol.encode(protocol.StepId(step_id))
            if bits.cancelled():
                self._outboxes[0].send_multipart([protocol.CANCEL, body])
            else:
                self._outboxes[0].send_multipart([protocol.MASK, body, bits.result().tobytes()])

        mask.bits.add_done_callback(send)

    def _send(self, message: list[bytes]) -> None:
        for outbox in self._outboxes:
            outbox.send_multipart(message)

    def _receive_until(self, is_done: Callable[[], bool], timeout_s: float, what: str) -> None:
        """Handle messages until a condition holds.

        Raises:
            RankFailedError: a rank failed, or the deadline has passed.
        """
        deadline_s = time.monotonic() + timeout_s
        while not is_done():
            if self._failure is not None:
                raise self._failure
            if self._inbox.poll(_POLL_MS):
                self._handle(self._inbox.recv_multipart())
                if self._failures:
                    self._fail()
                continue
            if self._processes.ended():
                self._fail()
            elif time.monotonic() > deadline_s:
                self._failures[0] = f"did not finish {what} within {timeout_s:g} s"
                self._fail()

    def _handle(self, message: list[bytes]) -> None:
        kind, frame = message
        if kind == protocol.RESULT:
            step_id, result = decode_result(frame)
            self._results[step_id] = result
            self._waiting.pop(step_id, None)
        elif kind == protocol.CANCELLED:
            step_id = protocol.decode(frame, protocol.StepId).step_id
            self._results[step_id] = EngineError(f"step {step_id} was dropped")
            self._waiting.pop(step_id, None)
        elif kind == protocol.ANSWER:
            answer: protocol.Answer = protocol.decode(frame, protocol.Answer)
            self._answers.get(answer.call_id, {})[answer.rank] = answer
        elif kind == protocol.STAGE:
            stage: protocol.Stage = protocol.decode(frame, protocol.Stage)
            self._on_stage(f"rank {stage.rank}: {stage.stage}")
        elif kind == protocol.READY:
            rank, info = protocol.decode(frame)
            self._ready[rank] = info
        elif kind == protocol.FAILED:
            self._note_failure(protocol.decode(frame, protocol.Failure))

    def _note_failure(self, failure: protocol.Failure) -> None:
        self._failures[failure.rank] = f"{failure.kind} during {failure.during}: {failure.message}"
        error = _error_named(failure.kind, failure.message)
        if self._refusal is None and not isinstance(error, EngineError):
            self._refusal = error

    # -- failures ------------------------------------------------------------------------------------------------------

    def _fail(self) -> None:
        """End the group, because a rank has failed.

        Raises:
            RankFailedError: always.
        """
        until_s = time.monotonic() + _LAST_WORDS_S
        size = len(self._outboxes)
        while len(self._failures) < size and (left_s := until_s - time.monotonic()) > 0:
            if self._inbox.poll(int(left_s * 1000) + 1):
                self._handle(self._inbox.recv_multipart())
            if len(self._failures | dict(self._processes.ended())) == size:
                break
        self._failure = RankFailedError(self._describe_failures())
        logger.error("%s", self._failure)
        self._stop_processes(0.0)
        self._note_end()
        raise self._failure

    def _describe_failures(self) -> str:
        """Return the last error of each rank. Ranks that only lost the connection to another rank come last."""
        ended = self._processes.ended()
        causes: list[str] = []
        effects: list[str] = []
        for rank in range(len(self._outboxes)):
            error = self._failures.get(rank) or ended.get(rank) or "no answer"
            lines = effects if error.startswith(RankFailedError.__name__) else causes
            lines.append(f"rank {rank} ({self._processes.place(rank)}): {error}")
        return f"the ranks of this replica have ended: {'; '.join(causes + effects)}"

    def _note_end(self) -> None:
        if self._callback is not None:
            self._callback()

    def _watch(self) -> None:
        """Call the callback if a process ends while no step runs."""
        while not self._is_closed.wait(_WATCH_S):
            if self._processes.ended():
                self._has_ended.set()
                self._note_end()
                return

    def _stop_processes(self, timeout_s: float = _STOP_S) -> None:
        self._processes.stop(timeout_s)


class _StepOutcome:
    """The result of a step on the ranks."""

    def __init__(self, group: RankGroup, step_id: int) -> None:
        self._group = group
        self._step_id = step_id
        self._found: StepResult | BaseException | None = None

    def result(self, timeout: float | None = None) -> StepResult:
        """Wait until the deadline of the group, and return the result; `timeout` is not used."""
        if self._found is None:
            try:
                self._found = self._group.result_of(self._step_id)
            except BaseException as error:
                self._found = error
        if isinstance(self._found, BaseException):
            raise self._found
        return self._found

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait until the deadline of the group, and return the exception, or None."""
        try:
            self.result()
        except BaseException as error:
            return error
        return None


def _error_named(kind: str, message: str) -> GraftlmError:
    """Return an error of a class in `graftlm.errors`; an EngineError if there is no such class."""
    found = getattr(errors, kind, None)
    return found(message) if isinstance(found, type) and issubclass(found, GraftlmError) else EngineError(message)
