"""The format of one block in a file: a header that says whose it is, and a checksum over header and data.

    magic 8 | version 4 | 4 zeros | fingerprint 32 | key 32 | data length 8 | checksum 32 | data
    └──────────────────── identity ──────────────────────┘

The checksum is SHA-256 over identity and data. It is cryptographic so that a block which somebody else's process
damaged is never taken for whole, and of those in the standard library the fastest where processors have
instructions for it; hashing releases the interpreter's lock.
"""

from __future__ import annotations

import hashlib
import os
import struct
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["FORMAT_VERSION", "HEADER_BYTES", "BlockFormat", "ReadResult"]

#: Part of every header and of the folder's name, so that two formats never meet.
FORMAT_VERSION = 1

_MAGIC = b"graftlmK"
_IDENTITY = struct.Struct("<8sII32s32sQ")
_CHECKSUM_BYTES = 32

#: What a file has more than its data.
HEADER_BYTES = _IDENTITY.size + _CHECKSUM_BYTES


class ReadResult(Enum):
    """What a file turned out to be."""

    INTACT = "intact"
    CORRUPT = "corrupt"
    FOREIGN = "foreign"


class BlockFormat:
    """Writes and reads the blocks of one fingerprint and size.

    Args:
        fingerprint: of the model; any length.
        block_bytes: size of a block's data.
    """

    def __init__(self, fingerprint: bytes, block_bytes: int) -> None:
        self._fingerprint = hashlib.sha256(fingerprint + block_bytes.to_bytes(8, "little")).digest()
        self._block_bytes = block_bytes

    @property
    def folder(self) -> str:
        """The name of the folder for blocks of this kind: 32 hexadecimal digits."""
        return hashlib.sha256(FORMAT_VERSION.to_bytes(4, "little") + self._fingerprint).hexdigest()[:32]

    @property
    def file_bytes(self) -> int:
        """The size of a file."""
        return HEADER_BYTES + self._block_bytes

    def write(self, fd: int, key: bytes, data: NDArray[np.uint8]) -> None:
        """Write a block to an empty file.

        Args:
            fd: open for writing.
            key: of the block.
            data: uint8 [block_bytes], contiguous.

        Raises:
            OSError: the medium refused, or took only a part.
        """
        identity = self._identity(key)
        content = data.data.cast("B")
        header = memoryview(identity + _checksum(identity, content))
        written = os.writev(fd, [header, content])
        while written < self.file_bytes:  # a call writes 2 GiB at most, and less where little room is left
            rest = header[written:] if written < HEADER_BYTES else content[written - HEADER_BYTES :]
            written += os.write(fd, rest)

    def read(self, fd: int, key: bytes, out: NDArray[np.uint8]) -> ReadResult:
        """Read a block and judge it.

        Args:
            fd: open for reading, at its start.
            key: of the block that is wanted.
            out: uint8 [block_bytes], contiguous; it holds anything unless the block is intact.

        Raises:
            OSError: the medium refused.
        """
        header, content = bytearray(HEADER_BYTES), out.data.cast("B")
        if os.fstat(fd).st_size < HEADER_BYTES or os.readv(fd, [header]) < HEADER_BYTES:
            return ReadResult.CORRUPT
        identity = self._identity(key)
        if header[: _IDENTITY.size] != identity:
            return ReadResult.FOREIGN
        if os.fstat(fd).st_size != self.file_bytes or not _read_fully(fd, content):
            return ReadResult.CORRUPT
        return ReadResult.INTACT if header[_IDENTITY.size :] == _checksum(identity, content) else ReadResult.CORRUPT

    def _identity(self, key: bytes) -> bytes:
        digest = hashlib.sha256(key).digest()
        return _IDENTITY.pack(_MAGIC, FORMAT_VERSION, 0, self._fingerprint, digest, self._block_bytes)


def _checksum(identity: bytes, content: memoryview) -> bytes:
    digest = hashlib.sha256(identity)
    digest.update(content)
    return digest.digest()


def _read_fully(fd: int, content: memoryview) -> bool:
    done = 0
    while done < len(content):
        count = os.readv(fd, [content[done:]])
        if count == 0:
            return False
        done += count
    return True
