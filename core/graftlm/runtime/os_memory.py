"""Returns memory of this process to the operating system."""

import ctypes
import logging
import mmap
import os
import sys
from typing import Final

__all__ = ["discard_pages", "trim_heap"]

_logger = logging.getLogger(__name__)

_IS_LINUX: Final = sys.platform.startswith("linux")


def discard_pages(address: int, num_bytes: int) -> bool:
    """Return the whole pages of a range of anonymous memory to the operating system.

    Effects: the addresses stay valid. The content of these pages is undefined; on Linux it is zero. The memory takes
        RAM again when it is written.

    Returns: False if the operating system refuses this or does not support it; the memory is then unchanged.
    """
    start = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (address + num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if end <= start:
        return True
    if not _IS_LINUX:
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    if libc.madvise(start, end - start, mmap.MADV_DONTNEED) == 0:
        return True
    _logger.warning("%d bytes cannot be returned to the system: %s", end - start, os.strerror(ctypes.get_errno()))
    return False


def trim_heap() -> None:
    """Return free memory of the C library's heap to the operating system, if the C library supports this."""
    if not _IS_LINUX:
        return
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # only in glibc
    if trim is not None:
        trim.argtypes = [ctypes.c_size_t]
        trim(0)
