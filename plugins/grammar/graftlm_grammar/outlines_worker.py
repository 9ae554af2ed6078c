"""The program of the process that tries to compile expressions with `outlines`. It imports nothing from graftlm.

The process starts in 50 ms. A message on its standard streams consists of a length in bytes (8 bytes, little-endian)
and the content. The process reads the maximum size of an index in bytes, then the vocabulary, then regular expressions.
For each expression it writes an empty message if the expression compiles, otherwise the reason.
"""

import os
import sys
from contextlib import suppress
from typing import BinaryIO, Final

import outlines_core

__all__ = ["read_message", "write_message"]

_OWN_BYTES: Final = 256 << 20  # address space for the interpreter and a vocabulary


def read_message(stream: BinaryIO) -> bytes | None:
    """Return the next message; None if the stream has ended."""
    head = stream.read(8)
    body = stream.read(int.from_bytes(head, "little")) if len(head) == 8 else b""
    return body if len(head) == 8 and len(body) == int.from_bytes(head, "little") else None


def write_message(stream: BinaryIO, body: bytes) -> None:
    """Write a message."""
    stream.write(len(body).to_bytes(8, "little"))
    stream.write(body)
    stream.flush()


def _answer(regex: str, vocabulary: outlines_core.Vocabulary) -> bytes:
    try:
        outlines_core.Index(regex, vocabulary)
    except ValueError as error:
        return str(error)[:300].encode() or b"no reason given"
    return b""


def _limit_memory(num_bytes: int) -> None:
    """Limit this process's address space, if the operating system supports this. Windows does not; macOS may refuse."""
    if sys.platform == "win32":
        return
    import resource

    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_AS, (num_bytes, num_bytes))


def _main() -> None:
    if sys.platform != "win32":
        os.nice(19)
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    _limit_memory(_OWN_BYTES + int.from_bytes(read_message(source) or b"", "little"))
    vocabulary = outlines_core.Vocabulary.from_binary(read_message(source) or b"")
    while (regex := read_message(source)) is not None:
        write_message(sink, _answer(regex.decode(), vocabulary))


if __name__ == "__main__":
    _main()
