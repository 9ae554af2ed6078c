"""What the server's processes say to each other: MessagePack structs, each with the protocol's version.

main ──Generate, Abort, Call──> scheduler ──TokenBatch──> detokenizer ──TextBatch──> main
main <──Progress, Ready, Failed, Reply, Load── scheduler, detokenizer

Three ids name what a client sends:

    request id      the client's id of a prompt, or one that main draws. Only main and the client use it. A client may
                    use it again when the prompt has ended.
    `PromptId`      main's id of a prompt: the request id and a number, never used twice. So a late message about an
                    aborted prompt cannot reach a later prompt of the same request id.
    `CompletionId`  the id of one of a prompt's `n` completions: the prompt id, followed by "#0", "#1" and so on if `n`
                    is above 1. To the scheduler each completion is a request: `Request.request_id` and
                    `RequestUpdate.request_id` are completion ids.

The in-process engine has no prompt ids: it makes completion ids of request ids.
"""

from dataclasses import fields
from typing import Any, Final, NewType, TypeAlias

import msgspec

from graftlm.errors import EngineError
from graftlm.records import EngineStats
from graftlm.request_options import DEFAULT_OPTIONS, RequestOptions
from graftlm.scheduling import CompletionId, RequestUpdate
from graftlm.types import SamplingParams

__all__ = [
    "PING_ID",
    "PROTOCOL_VERSION",
    "Abort",
    "Accepted",
    "AnyMessage",
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

#: Both ends of a channel are of one installation; a child that a supervisor kept from an older one is refused.
PROTOCOL_VERSION: Final = 1


#: The `call_id` of the launcher's own question, whether a process moves; nobody else waits for its answer.
PING_ID: Final = 0


#: Main's id of a prompt; see the top of this module.
PromptId = NewType("PromptId", str)


class MessageError(EngineError):
    """A message cannot be written or read, or is of another protocol version."""


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True, kw_only=True):
    """Base of all messages."""

    version: int = PROTOCOL_VERSION


# -- main to scheduler -------------------------------------------------------------------------------------------------


class Generate(Message, frozen=True, kw_only=True):
    """Start a prompt: all its completions, or none.

    Attributes:
        prompt: token ids, int32 in native byte order: a view of the sender's array, and of the received message.
        params: the fields of SamplingParams that are not at their default.
    """

    prompt_id: PromptId
    prompt: memoryview
    params: dict[str, Any]
    seed: int
    options: RequestOptions = DEFAULT_OPTIONS


class Abort(Message, frozen=True, kw_only=True):
    """End completions, waiting or running; unknown ids are ignored. None ends all of them.

    A scheduler answers with their last updates; a detokenizer forgets their texts.
    """

    completion_ids: list[CompletionId] | None
    reason: str


class Call(Message, frozen=True, kw_only=True):
    """Ask for something that is answered by a Reply of the same id."""

    call_id: int
    name: str
    arguments: dict[str, Any] = {}


class UseDetokenizer(Message, frozen=True, kw_only=True):
    """Send tokens to another detokenizer from now on; every request has ended."""

    endpoint: str


class LoadTokenizer(Message, frozen=True, kw_only=True):
    """The tokenizer, in the `tokenizers` library's JSON: what a child still needs to answer with Ready."""

    json: str


class Shutdown(Message, frozen=True, kw_only=True):
    """End the process."""


# -- scheduler to detokenizer ------------------------------------------------------------------------------------------


class Opened(Message, frozen=True, kw_only=True):
    """A prompt was accepted; how to turn its tokens into text.

    Attributes:
        params: as in Generate.
    """

    completion_ids: list[CompletionId]
    params: dict[str, Any]


class TokenBatch(Message, frozen=True, kw_only=True):
    """What a step brought."""

    updates: list[RequestUpdate]


# -- to main -----------------------------------------------------------------------------------------------------------


class Accepted(Message, frozen=True, kw_only=True):
    """A prompt's completions wait or run."""

    prompt_id: PromptId


class Rejected(Message, frozen=True, kw_only=True):
    """A prompt was refused; `error` is the name of a class in `graftlm.errors`."""

    prompt_id: PromptId
    error: str
    message: str


class TextBatch(Message, frozen=True, kw_only=True):
    """What a step brought, with the text that each update adds."""

    updates: list[RequestUpdate]
    texts: list[str]


class Progress(Message, frozen=True, kw_only=True):
    """How far the start of a process is."""

    process: str
    stage: str


class Ready(Message, frozen=True, kw_only=True):
    """A process can take messages; `info` is what main must know of it.

    Attributes:
        pid: tells it from one of the same name whose last words come late.
    """

    process: str
    pid: int
    info: dict[str, Any]


class Failed(Message, frozen=True, kw_only=True):
    """A process could not start, or go on; `error` is the name of a class in `graftlm.errors`.

    Attributes:
        pid: as in Ready.
    """

    process: str
    pid: int
    error: str
    message: str


class Reply(Message, frozen=True, kw_only=True):
    """The answer to a Call; `error` says why there is no value."""

    process: str
    call_id: int
    value: Any = None
    error: str | None = None


class Load(Message, frozen=True, kw_only=True):
    """A scheduler's state and sums, from time to time while it works.

    Attributes:
        histograms: name -> counts by bucket, then the sum of what was observed.
    """

    process: str
    stats: EngineStats
    histograms: dict[str, tuple[list[int], float]]


ToScheduler: TypeAlias = LoadTokenizer | Generate | Abort | Call | UseDetokenizer | Shutdown
ToDetokenizer: TypeAlias = LoadTokenizer | Opened | TokenBatch | Abort | Call | Shutdown
FromChild: TypeAlias = Accepted | Rejected | TextBatch | Progress | Ready | Failed | Reply | Load

AnyMessage: TypeAlias = (
    Generate | Abort | Call | UseDetokenizer | LoadTokenizer | Shutdown | Opened | TokenBatch | FromChild
)

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[AnyMessage] = msgspec.msgpack.Decoder(AnyMessage)


def encode(message: Message) -> bytes:
    """Return a message's wire form.

    Raises:
        MessageError: it holds what cannot be written, such as an integer of more than 64 bits.
    """
    try:
        return _encoder.encode(message)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:  # a Unicode error is a ValueError
        raise MessageError(f"a message of type {type(message).__name__} cannot be written: {error}") from error


def decode(data: bytes) -> AnyMessage:
    """Read a message.

    Raises:
        MessageError: it is none, or of another version.
    """
    try:
        message = _decoder.decode(data)
    except msgspec.MsgspecError as error:
        raise MessageError(f"a message of {len(data)} bytes cannot be read: {error}") from error
    if message.version != PROTOCOL_VERSION:
        raise MessageError(f"a message speaks protocol {message.version}, this process {PROTOCOL_VERSION}")
    return message


_DEFAULTS: Final = {field.name: getattr(SamplingParams(), field.name) for field in fields(SamplingParams)}


def params_to_wire(params: SamplingParams) -> dict[str, Any]:
    """Return the fields that are not at their default."""
    values = {name: getattr(params, name) for name in _DEFAULTS}
    return {name: value for name, value in values.items() if value != _DEFAULTS[name]}


def params_from_wire(values: dict[str, Any]) -> SamplingParams:
    """Return the parameters that `params_to_wire` wrote.

    Raises:
        SamplingParamsError: a value is out of range.
    """
    return SamplingParams(**values)
