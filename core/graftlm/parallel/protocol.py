"""The setup of a rank's process, and the messages between a scheduler and its ranks.

Each rank has one inbox. All ranks send to one inbox of the scheduler. A message is a list of frames; the first frame is
the kind.

scheduler ──PLAN, MASK, CANCEL, CALL, STOP──> rank
scheduler <──STAGE, READY, RESULT, ANSWER, FAILED── rank
"""

from typing import Any, Final, Literal

import msgspec

__all__ = [
    "ANSWER",
    "CALL",
    "CANCEL",
    "CANCELLED",
    "FAILED",
    "MASK",
    "PLAN",
    "READY",
    "RESULT",
    "STAGE",
    "STOP",
    "Answer",
    "Call",
    "Failure",
    "RankSetup",
    "Stage",
    "StepId",
    "decode",
    "encode",
]

#: A step: two frames of `graftlm.parallel.wire.encode_plan`. Sent to all ranks.
PLAN: Final = b"p"
#: The bits of a plan's token mask: a `StepId`, then int32 [M, W]. Sent to rank 0, as all masks.
MASK: Final = b"m"
#: The mask of a step is never filled: a `StepId`. The step ends without a result.
CANCEL: Final = b"x"
#: An operation of the worker: a `Call`. Sent to all ranks.
CALL: Final = b"c"
#: The end of the process. Sent to all ranks.
STOP: Final = b"s"

#: Progress of a start: a `Stage`.
STAGE: Final = b"g"
#: The rank can run plans: its properties as plain data.
READY: Final = b"y"
#: The result of a step: one frame of `graftlm.parallel.wire.encode_result`. Sent by rank 0.
RESULT: Final = b"r"
#: The step whose mask was cancelled has ended: a `StepId`. Sent by rank 0.
CANCELLED: Final = b"z"
#: The return value or the error of a call: an `Answer`.
ANSWER: Final = b"a"
#: The rank ends because of an error: a `Failure`.
FAILED: Final = b"f"


class RankSetup(msgspec.Struct, frozen=True, kw_only=True):
    """The setup of a rank's process, one line of JSON.

    Attributes:
        name: name of the process in the log.
        rank, size: place of the rank, and number of ranks.
        inbox: address at which the rank receives messages.
        scheduler: address of the scheduler's inbox.
        store: path of the file at which the ranks meet.
        device: torch device type of the tensors.
        timeout_s: deadline of a step, of a mask and of an exchange between ranks, in seconds.
        start_timeout_s: deadline of exchanges while the rank starts.
        worker: "module:function" of the function that creates the rank's worker; see `RankWorker`.
        arguments: plain data for this function.
        sys_path: `sys.path` of the scheduler, so that the rank finds plugins that are not installed.
        log_format, log_level: settings of the log.
        num_threads: number of threads for tensor operations; None: torch's default.
    """

    name: str
    rank: int
    size: int
    inbox: str
    scheduler: str
    store: str
    device: str
    timeout_s: float
    start_timeout_s: float
    worker: str
    arguments: dict[str, Any]
    sys_path: list[str]
    log_format: Literal["text", "json"] = "text"
    log_level: str = "info"
    num_threads: int | None = None


class _Message(msgspec.Struct, frozen=True, array_like=True):
    """The base class of message bodies."""


class StepId(_Message, frozen=True):
    """The step that a message concerns."""

    step_id: int


class Call(_Message, frozen=True):
    """An operation of the worker, with its arguments as plain data."""

    call_id: int
    operation: str
    arguments: dict[str, Any]


class Answer(_Message, frozen=True):
    """The return value of a call.

    Attributes:
        error: class name and text of a `GraftlmError` that the operation raised; None if it returned.
    """

    rank: int
    call_id: int
    value: Any = None
    error: tuple[str, str] | None = None


class Stage(_Message, frozen=True):
    """The stage of a rank's start."""

    rank: int
    stage: str


class Failure(_Message, frozen=True):
    """The error with which a rank ends.

    Attributes:
        kind: class name of the error.
        during: what the rank did, such as "step 7".
    """

    rank: int
    kind: str
    message: str
    during: str


_encoder = msgspec.msgpack.Encoder()


def encode(body: object) -> bytes:
    """Return plain data or a message body as a frame."""
    return _encoder.encode(body)


def decode(frame: bytes, kind: Any = Any) -> Any:
    """Return the content of a frame, as an object of a class of this module or as plain data."""
    return msgspec.msgpack.decode(frame, type=kind)
