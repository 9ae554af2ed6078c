"""Recorded request traces: which blocks of tokens each request asked for, and when.

A trace is JSON lines, one request each. Two forms are read; they differ in their optional fields only.

    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, ...]}             Mooncake
    {..., "output_hash_ids": [...], "block_tokens": 16, "namespace": "9f3c", "priority": 0}                graftlm's

An id stands for one block of tokens together with all that stands before it; the last block of a list may be partial.
`output_hash_ids` goes on where the whole blocks of the input end:

    tokens            |<- whole blocks of the input ->|<- rest of input ->|<- output, less its last token ->|
    hash_ids          |  h0   h1   h2   ...           |  h_last           |
    output_hash_ids                                   |  o0      o1      ...                                |

The last output token never passes through the model, so no cache holds it.
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

#: Tokens in a block of the Mooncake traces.
DEFAULT_BLOCK_TOKENS: Final = 512


#: Tokens in a request or a block at most; a replay writes them all out.
_MAX_TOKENS: Final = 2**26


class TraceError(GraftlmError, ValueError):
    """A trace cannot be read; the message says file and line."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One recorded request.

    Attributes:
        time_s: when it arrived.
        block_ids: int32 [blocks]; ids of one trace count from 0, and equal ids mean equal tokens.
        prompt_tokens: of its input; at least 1.
        num_tokens: that a cache may keep of it: its input and, where recorded, its output less the last token.
        namespace: requests of different namespaces share nothing.
        priority: as the client gave it.
    """

    time_s: float
    block_ids: NDArray[np.int32]
    prompt_tokens: int
    num_tokens: int
    namespace: str = ""
    priority: int = 0

    def token_ids(self, block_tokens: int) -> TokenIds:
        """Return int32 [num_tokens]: each block's id in place of each of its tokens."""
        return np.repeat(self.block_ids, block_tokens)[: self.num_tokens]


@dataclass(frozen=True, slots=True)
class Trace:
    """The requests of one file.

    Attributes:
        name: for reports.
        block_tokens: tokens in a block.
        requests: in the order in which they arrived.
    """

    name: str
    block_tokens: int
    requests: tuple[TraceRequest, ...]

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all inputs."""
        return sum(request.prompt_tokens for request in self.requests)


_Positive = Annotated[int, msgspec.Meta(ge=1)]
_Count = Annotated[int, msgspec.Meta(ge=0)]


class _Line(msgspec.Struct):
    """A line of either form; fields that others add are ignored."""

    timestamp: float
    input_length: _Positive
    hash_ids: list[int]
    output_length: _Count = 0
    output_hash_ids: list[int] | None = None
    block_tokens: _Positive | None = None
    namespace: str = ""
    priority: int = 0


def read_trace(path: Path, block_tokens: int = DEFAULT_BLOCK_TOKENS) -> Trace:
    """Read a trace from a file; as `parse_trace`.

    Raises:
        TraceError: it cannot be read, or a line is wrong.
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
        lines: JSON, one request each; empty ones are skipped.
        source: what they come from, for messages.
        block_tokens: of a trace whose lines do not say.
        name: for reports; None takes `source`.

    Raises:
        TraceError: a line is no request, does not have the blocks its lengths ask for, or differs from the first in
            `block_tokens`; or there is none.
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
        raise TraceError(f"{source}: the trace is empty, expected one request a line")
    requests = sorted(reader.requests, key=lambda request: request.time_s)
    return Trace(name or source, reader.block_tokens, tuple(requests))


class _Reader:
    """Turns lines into requests, and the ids of a file into small ones.

    An id that once stands for a whole block and once for a partial one is taken for two: what they share is unknown.
    """

    def __init__(self, block_tokens: int, given: bool) -> None:
        self.block_tokens = block_tokens
        self.requests: list[TraceRequest] = []
        self._given = given
        self._numbers: dict[tuple[int, int], int] = {}

    def add(self, line: _Line) -> str | None:
        """Take a line; returns what is wrong with it, or None."""
        size = self.block_tokens
        if (line.block_tokens is not None) != self._given or line.block_tokens not in (None, size):
            return f"block_tokens is {line.block_tokens}, the first line has {size if self._given else None}"
        most = max(size, line.input_length, line.output_length if line.output_hash_ids is not None else 0)
        if most > _MAX_TOKENS:
            return f"a request or block of {most} tokens is beyond the {_MAX_TOKENS} that can be replayed"
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
                self._small(ids, num_tokens),
                line.input_length,
                num_tokens,
                line.namespace,
                line.priority,
            )
        )
        return None

    def _small(self, ids: list[int], num_tokens: int) -> NDArray[np.int32]:
        numbers, size = self._numbers, self.block_tokens
        last_tokens = num_tokens - (len(ids) - 1) * size
        small = [numbers.setdefault((block, size), len(numbers)) for block in ids[:-1]]
        small += [numbers.setdefault((block, last_tokens), len(numbers)) for block in ids[-1:]]
        return np.array(small, dtype=np.int32)


def _count_problem(field: str, ids: list[int], num_before: int, num_tokens: int, block_tokens: int) -> str | None:
    """Say that a list has not one id for each block past `num_before` of so many tokens."""
    expected = -(-num_tokens // block_tokens) - num_before
    if len(ids) == expected:
        return None
    return (
        f"{field} has {len(ids)} ids, expected {expected}: blocks {num_before} to {num_before + expected - 1} of "
        f"{num_tokens} tokens at {block_tokens} a block. Is --block-tokens right?"
    )
