"""The messages between the server's processes. Each is a MessagePack array that contains the protocol's version.

"main" is the main process, which serves HTTP.

main ──Generate, Abort, Call──> scheduler ──TokenBatch──> detokenizer ──TextBatch──> main
main <──Progress, Ready, Failed, Reply, Load, CacheChanges── scheduler, detokenizer

There are three kinds of ids:

    request id      the client's id of a prompt, or a random id that main creates. Only main and the client use it. A
                    client may reuse it when the prompt has ended.
    `PromptId`      main's id of a prompt. It consists of the request id and a number, and is never reused. Therefore a
                    late message about an aborted prompt cannot reach a later prompt with the same request id.
    `CompletionId`  the id of one of a prompt's `n` completions: the prompt id, followed by "#0", "#1" and so on if `n`
                    is above 1. In the scheduler, each completion is a request: `Request.request_id` and
                    `RequestUpdate.request_id` are completion ids.

The in-process engine has no prompt ids. It derives completion ids from request ids.
"""

from typing import Any, Final, NewType, TypeAlias

import msgspec

from graftlm.errors import EngineError
from graftlm.media import MediaOnWire
from graftlm.records import EngineStats
from graftlm.request_options import DEFAULT_OPTIONS, RequestOptions
from graftlm.sampling_params import changed_fields
from graftlm.scheduling import CompletionId, RequestUpdate
from graftlm.types import SamplingParams

__all__ = [
    "PING_ID",
    "PROTOCOL_VERSION",
    "Abort",
    "Accepted",
    "AnyMessage",
    "CacheChanges",
    "Call",
    "Failed",
    "FromChild",
    "Generate",
    "Load",
    "LoadTokenizer",
    "Message",
    "MessageError",
    "Opened",
    "Progress",
    "PromptId",
    "Ready",
    "Rejected",
    "Reply",
    "Shutdown",
    "TextBatch",
    "ToDetokenizer",
    "ToScheduler",
    "TokenBatch",
    "UseDetokenizer",
    "decode",
    "encode",
    "params_from_wire",
    "params_to_wire",
]

#: Version of the messages, which must be equal at both ends of a channel. A child of an older installation is refused.
PROTOCOL_VERSION: Final = 1


#: The `call_id` of the watchdog's pings. `ProcessCalls` uses higher ids.
PING_ID: Final = 0


#: An id of a prompt that main creates; see this module's docstring.
PromptId = NewType("PromptId", str)


class MessageError(EngineError):
    """The error of a message that cannot be encoded or decoded, or has another protocol version."""


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True, kw_only=True):
    """The base class of all messages."""

    version: int = PROTOCOL_VERSION


# -- main to scheduler -------------------------------------------------------------------------------------------------


class Generate(Message, frozen=True, kw_only=True):
    """Queue all completions of a prompt. If one is refused, none is queued.

    Attributes:
        prompt: token ids, int32 in native byte order, as a view of the sender's array or of the received message.
        params: the fields of SamplingParams that differ from their default value.
        seed: the seed of all completions.
        media: the prompt's pictures; None: no pictures.
    """

    prompt_id: PromptId
    prompt: memoryview
    params: dict[str, Any]
    seed: int
    options: RequestOptions = DEFAULT_OPTIONS
    media: MediaOnWire | None = None


class Abort(Message, frozen=True, kw_only=True):
    """Abort waiting or running completions. Unknown ids are ignored; None means all completions.

    A scheduler answers with the last updates of the completions. A detokenizer discards the texts of the completions.
    """

    completion_ids: list[CompletionId] | None
    reason: str


class Call(Message, frozen=True, kw_only=True):
    """Call a function of a process. The process answers with a Reply that has the same id."""

    call_id: int
    name: str
    arguments: dict[str, Any] = {}


class UseDetokenizer(Message, frozen=True, kw_only=True):
    """Send tokens to a new detokenizer from now on. All requests of the old detokenizer have ended."""

    endpoint: str


class LoadTokenizer(Message, frozen=True, kw_only=True):
    """The tokenizer, as JSON of the `tokenizers` library. A child needs it before it can answer with Ready."""

    json: str


class Shutdown(Message, frozen=True, kw_only=True):
    """End the process."""


# -- scheduler to detokenizer ------------------------------------------------------------------------------------------


class Opened(Message, frozen=True, kw_only=True):
    """A prompt was accepted. Its tokens will follow.

    Attributes:
        params: the params of Generate, which determine the conversion of the tokens to text.
    """

    completion_ids: list[CompletionId]
    params: dict[str, Any]


class TokenBatch(Message, frozen=True, kw_only=True):
    """The updates of one step."""

    updates: list[RequestUpdate]


# -- to main -----------------------------------------------------------------------------------------------------------


class Accepted(Message, frozen=True, kw_only=True):
    """All completions of a prompt are queued."""

    prompt_id: PromptId


class Rejected(Message, frozen=True, kw_only=True):
    """A prompt was refused. `error` is the name of a class in `graftlm.errors`."""

    prompt_id: PromptId
    error: str
    message: str


class TextBatch(Message, frozen=True, kw_only=True):
    """The updates of one step, with the new text of each."""

    updates: list[RequestUpdate]
    texts: list[str]


class Progress(Message, frozen=True, kw_only=True):
    """The current stage of a process's start."""

    process: str
    stage: str


class Ready(Message, frozen=True, kw_only=True):
    """A process has started and is ready for messages.

    Attributes:
        pid: process id, which distinguishes the process from earlier processes with the same name.
        info: information for the main process; empty for a detokenizer.
    """

    process: str
    pid: int
    info: dict[str, Any]


class Failed(Message, frozen=True, kw_only=True):
    """A process failed to start, or ends with an error.

    Attributes:
        pid: process id.
        error: name of a class in `graftlm.errors`.
    """

    process: str
    pid: int
    error: str
    message: str


class Reply(Message, frozen=True, kw_only=True):
    """The answer to a Call. `error` is the message of the call's error, None if the call succeeded."""

    process: str
    call_id: int
    value: Any = None
    error: str | None = None


class Load(Message, frozen=True, kw_only=True):
    """A scheduler's state and counters. It is sent every 0.2 s while the scheduler works, and once when it is idle.

    Attributes:
        histograms: name -> (counts by bucket, sum of all observed values).
        prefill_tokens: number of prompt tokens that steps have computed.
    """

    process: str
    stats: EngineStats
    histograms: dict[str, tuple[list[int], float]]
    prefill_tokens: int = 0


class CacheChanges(Message, frozen=True, kw_only=True):
    """The changes of a replica's prefix cache since the last message, for the routing policy.

    Attributes:
        changes: (kind, digests) of each change, oldest first. Kinds are "stored", "removed" and "cleared". `digests`
            are uint64, little-endian.
    """

    process: str
    changes: list[tuple[str, bytes]]


ToScheduler: TypeAlias = LoadTokenizer | Generate | Abort | Call | UseDetokenizer | Shutdown
ToDetokenizer: TypeAlias = LoadTokenizer | Opened | TokenBatch | Abort | Call | Shutdown
FromChild: TypeAlias = Accepted | Rejected | TextBatch | Progress | Ready | Failed | Reply | Load | CacheChanges

AnyMessage: TypeAlias = (
    Generate | Abort | Call | UseDetokenizer | LoadTokenizer | Shutdown | Opened | TokenBatch | FromChild
)

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[AnyMessage] = msgspec.msgpack.Decoder(AnyMessage)


def encode(message: Message) -> bytes:
    """Encode a message as MessagePack.

    Raises:
        MessageError: a value cannot be encoded, such as an integer of more than 64 bits.
    """
    try:
        return _encoder.encode(message)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:  # a Unicode error is a ValueError
        raise MessageError(f"a message of type {type(message).__name__} cannot be encoded: {error}") from error


def decode(data: bytes) -> AnyMessage:
    """Decode a message.

    Raises:
        MessageError: the data is not a message, or has another protocol version.
    """
    try:
        message = _decoder.decode(data)
    except msgspec.MsgspecError as error:
        raise MessageError(f"a message of {len(data)} bytes cannot be decoded: {error}") from error
    if message.version != PROTOCOL_VERSION:
        raise MessageError(
            f"a message has protocol version {message.version}, but this process has version {PROTOCOL_VERSION}"
        )
    return message


def params_to_wire(params: SamplingParams) -> dict[str, Any]:
    """Return the fields that differ from their default value."""
    return changed_fields(params)


def params_from_wire(values: dict[str, Any]) -> SamplingParams:
    """Return the parameters from the result of `params_to_wire`.

    Raises:
        SamplingParamsError: a value is out of range.
    """
    return SamplingParams(**values)
