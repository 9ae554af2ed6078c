"""Recorded request traces: the token blocks and the arrival time of each request.

A trace is a file of JSON lines, with one request per line. There are two forms; graftlm's form has more fields:

    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, ...]}             Mooncake
    {..., "output_hash_ids": [...], "block_tokens": 16, "namespace": "9f3c", "priority": 0}                graftlm's

An id identifies a block of tokens together with all tokens before the block. The last block of a list may be partial.
`output_hash_ids` starts after the last whole block of the input:

    tokens            |<- whole blocks of the input ->|<- rest of input ->|<- output, less its last token ->|
    hash_ids          |  h0   h1   h2   ...           |  h_last           |
    output_hash_ids                                   |  o0      o1      ...                                |

The last output token is never an input of the model, so its keys and values are never computed.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from graftlm.errors import GraftlmError
from graftlm.types import TokenIds

__all__ = ["DEFAULT_BLOCK_TOKENS", "Trace", "TraceError", "TraceRequest", "parse_trace", "read_trace"]

#: Number of tokens in a block of the Mooncake traces.
DEFAULT_BLOCK_TOKENS: Final = 512


#: Maximum number of tokens in a request or a block, because a replay creates an array of this size.
_MAX_TOKENS: Final = 2**26


class TraceError(GraftlmError, ValueError):
    """A trace cannot be read. The message contains the file and the line."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One recorded request.

    Attributes:
        time_s: arrival time in seconds.
        block_ids: int32 [blocks], ids of the blocks, renumbered from 0 in each trace; equal ids mean equal tokens.
        prompt_tokens: number of input tokens, at least 1.
        num_tokens: number of tokens that a cache may store: the input and, if it is recorded, the output without its
            last token.
        namespace: requests of different namespaces share no pages.
        priority: the priority that the client requested.
        output_tokens: number of generated tokens; 0 if it is not recorded.
    """

    time_s: float
    block_ids: NDArray[np.int32]
    prompt_tokens: int
    num_tokens: int
    namespace: str = ""
    priority: int = 0
    output_tokens: int = 0

    def token_ids(self, block_tokens: int) -> TokenIds:
        """Return the tokens of the request, int32 [num_tokens]. Each token is replaced by the id of its block."""
        return np.repeat(self.block_ids, block_tokens)[: self.num_tokens]


@dataclass(frozen=True, slots=True)
class Trace:
    """The requests of one file.

    Attributes:
        name: name of the trace in reports.
        block_tokens: number of tokens in a block.
        requests: the requests in order of arrival.
    """

    name: str
    block_tokens: int
    requests: tuple[TraceRequest, ...]

    @property
    def prompt_tokens(self) -> int:
        """Number of input tokens of all requests."""
        return sum(request.prompt_tokens for request in self.requests)


_Positive = Annotated[int, msgspec.Meta(ge=1)]
_Count = Annotated[int, msgspec.Meta(ge=0)]


class _Line(msgspec.Struct):
    """A line of a trace, in either form. Unknown fields are ignored."""

    timestamp: float
    input_length: _Positive
    hash_ids: list[int]
    output_length: _Count = 0
    output_hash_ids: list[int] | None = None
    block_tokens: _Positive | None = None
    namespace: str = ""
    priority: int = 0


def read_trace(path: Path, block_tokens: int = DEFAULT_BLOCK_TOKENS) -> Trace:
    """Read a trace from a file. The trace has the file's name without the suffix.

    Args:
        path: the file.
        block_tokens: see `parse_trace`.

    Raises:
        TraceError: the file cannot be read, or `parse_trace` raises this error.
    """
    try:
        with path.open("rb") as lines:
            return parse_trace(lines, str(path), block_tokens, name=path.stem)
    except OSError as error:
        raise TraceError(f"cannot read the trace {path}: {error.strerror or error}") from error


def parse_trace(
    lines: Iterable[bytes], source: str, block_tokens: int = DEFAULT_BLOCK_TOKENS, name: str | None = None
) -> Trace:
    """Parse a trace.

    Args:
        lines: JSON lines with one request each; empty lines are skipped.
        source: the origin of the lines, for messages.
        block_tokens: number of tokens in a block, for a trace whose lines do not contain this number.
        name: name of the trace in reports; None: `source`.

    Returns: the trace, with its requests in order of arrival.

    Raises:
        TraceError: a line is not a request or is too long, its number of ids does not match its lengths, or its
            `block_tokens` differs from the first line's. Or there are no lines.
    """
    reader: _Reader | None = None
    decode = msgspec.json.Decoder(_Line, strict=True).decode
    for number, text in enumerate(lines, 1):
        if not text.strip():
            continue
        try:
            line = decode(text)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise TraceError(f"{source}:{number}: not a recorded request: {error}") from error
        if reader is None:
            reader = _Reader(line.block_tokens or block_tokens, given=line.block_tokens is not None)
        if problem := reader.add(line):
            raise TraceError(f"{source}:{number}: {problem}")
    if reader is None:
        raise TraceError(f"{source}: the trace is empty; expected one request per line")
    requests = sorted(reader.requests, key=lambda request: request.time_s)
    return Trace(name or source, reader.block_tokens, tuple(requests))


class _Reader:
    """A converter of lines to requests, which replaces the ids of the file by numbers from 0.

    An id may identify a whole block in one request and a partial block in another request. Such an id gets two numbers,
    because it is unknown which tokens the two blocks have in common.

    Attributes:
        block_tokens: number of tokens in a block.
        requests: the requests so far.
    """

    def __init__(self, block_tokens: int, given: bool) -> None:
        self.block_tokens = block_tokens
        self.requests: list[TraceRequest] = []
        self._given = given
        self._numbers: dict[tuple[int, int], int] = {}

    def add(self, line: _Line) -> str | None:
        """Add the request of a line; return an error message if the line is wrong, else None."""
        size = self.block_tokens
        if (line.block_tokens is not None) != self._given or line.block_tokens not in (None, size):
            return f"block_tokens is {line.block_tokens}, but the first line has {size if self._given else None}"
        most = max(size, line.input_length, line.output_length if line.output_hash_ids is not None else 0)
        if most > _MAX_TOKENS:
            return f"a request or block of {most} tokens is too long; at most {_MAX_TOKENS} tokens can be replayed"
        if problem := _count_problem("hash_ids", line.hash_ids, 0, line.input_length, size):
            return problem
        ids, num_tokens = line.hash_ids, line.input_length
        if line.output_hash_ids is not None:
            num_tokens += max(line.output_length - 1, 0)
            num_whole = line.input_length // size
            if problem := _count_problem("output_hash_ids", line.output_hash_ids, num_whole, num_tokens, size):
                return problem
            ids = ids[:num_whole] + line.output_hash_ids
        self.requests.append(
            TraceRequest(
                line.timestamp / 1000,
                self._renumber(ids, num_tokens),
                line.input_length,
                num_tokens,
                line.namespace,
                line.priority,
                line.output_length,
            )
        )
        return None

    def _renumber(self, ids: list[int], num_tokens: int) -> NDArray[np.int32]:
        """Return the new ids of blocks that have `num_tokens` tokens in total, int32 [blocks]."""
        numbers, size = self._numbers, self.block_tokens
        last_tokens = num_tokens - (len(ids) - 1) * size
        renumbered = [numbers.setdefault((block, size), len(numbers)) for block in ids[:-1]]
        renumbered += [numbers.setdefault((block, last_tokens), len(numbers)) for block in ids[-1:]]
        return np.array(renumbered, dtype=np.int32)


def _count_problem(field: str, ids: list[int], num_before: int, num_tokens: int, block_tokens: int) -> str | None:
    """Return an error message if a list does not have one id for each block of `num_tokens` tokens.

    Args:
        field: name of the list, for the message.
        ids: the list.
        num_before: number of blocks before the first block of the list.
        num_tokens: number of tokens in all blocks.
        block_tokens: number of tokens in a block.
    """
    expected = -(-num_tokens // block_tokens) - num_before
    if len(ids) == expected:
        return None
    return (
        f"{field} has {len(ids)} ids, expected {expected}: blocks {num_before} to {num_before + expected - 1} of "
        f"{num_tokens} tokens, with {block_tokens} tokens per block. Check --block-tokens."
    )
