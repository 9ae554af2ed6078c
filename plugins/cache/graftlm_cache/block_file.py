"""The format of a block file: a header that identifies the block, a checksum over header and data, and the data.

    magic 8 | version 4 | 4 zeros | fingerprint 32 | key 32 | data length 8 | checksum 32 | data
    └──────────────────── identity ──────────────────────┘

The checksum is SHA-256 over identity and data. A cryptographic hash also detects a block that another process has
changed. SHA-256 is the fastest cryptographic hash of the standard library on processors with instructions for it.
Hashing releases the interpreter's lock.
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

#: Part of every header and of the folder's name, so that files of different formats are never in the same folder.
FORMAT_VERSION = 1

_MAGIC = b"graftlmK"
_IDENTITY = struct.Struct("<8sII32s32sQ")
_CHECKSUM_BYTES = 32

#: Bytes of a file before its data.
HEADER_BYTES = _IDENTITY.size + _CHECKSUM_BYTES


class ReadResult(Enum):
    """The result of reading a block file."""

    INTACT = "intact"
    CORRUPT = "corrupt"  # wrong size or checksum
    FOREIGN = "foreign"  # the header identifies another block or format


class BlockFormat:
    """Writes and reads the blocks of one fingerprint and size.

    Args:
        fingerprint: fingerprint of the model, of any length.
        block_bytes: size of a block's data in bytes.
    """

    def __init__(self, fingerprint: bytes, block_bytes: int) -> None:
        self._fingerprint = hashlib.sha256(fingerprint + block_bytes.to_bytes(8, "little")).digest()
        self._block_bytes = block_bytes

    @property
    def folder(self) -> str:
        """The name of the folder for blocks of this fingerprint, size and format: 32 hexadecimal digits."""
        return hashlib.sha256(FORMAT_VERSION.to_bytes(4, "little") + self._fingerprint).hexdigest()[:32]

    @property
    def file_bytes(self) -> int:
        """The size of a file in bytes."""
        return HEADER_BYTES + self._block_bytes

    def write(self, fd: int, key: bytes, data: NDArray[np.uint8]) -> None:
        """Write a block to an empty file.

        Args:
            fd: file descriptor, open for writing.
            key: key of the block.
            data: uint8 [block_bytes], contiguous.

        Raises:
            OSError: the write failed; a part may have been written.
        """
        identity = self._identity(key)
        content = data.data.cast("B")
        header = memoryview(identity + _checksum(identity, content))
        written = os.writev(fd, [header, content])
        while written < self.file_bytes:  # a call writes at most 2 GiB, and less if the disk is almost full
            rest = header[written:] if written < HEADER_BYTES else content[written - HEADER_BYTES :]
            written += os.write(fd, rest)

    def read(self, fd: int, key: bytes, out: NDArray[np.uint8]) -> ReadResult:
        """Read a block and check it.

        Args:
            fd: file descriptor, open for reading, at its start.
            key: key of the expected block.
            out: uint8 [block_bytes], contiguous; its content is valid only if the result is `INTACT`.

        Raises:
            OSError: the read failed.
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


def _checksum(identity: bytes, content: memoryview) -> bytes:  # SHA-256, 32 bytes
    digest = hashlib.sha256(identity)
    digest.update(content)
    return digest.digest()


def _read_fully(fd: int, content: memoryview) -> bool:
    """Fill `content` from a file. Return False if the file ends too early."""
    done = 0
    while done < len(content):
        count = os.readv(fd, [content[done:]])
        if count == 0:
            return False
        done += count
    return True
