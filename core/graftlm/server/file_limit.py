"""The process's limit of open files, and how many connections fit under it."""

import os
from typing import Final

__all__ = ["connections_under", "num_open_files", "raise_file_limit"]

#: Where the hard limit is "unlimited" or close to it.
_MOST_FILES: Final = 2**20
#: Windows has no limit of a process that can be read; its sockets are no files of the C library.
_WINDOWS_FILES: Final = 8192
#: Files kept free for weights, adapters, traces, sockets between the processes and connections that are about to close.
_RESERVED_FILES: Final = 256
#: A derived limit keeps the memory of connections that send no request below 400 MiB.
_MOST_CONNECTIONS: Final = 4096
_FEWEST_CONNECTIONS: Final = 16


def raise_file_limit() -> int:
    """Raise this process's soft limit of open files to the hard limit; returns the limit in effect, 8192 on Windows.

    Effects: processes that are started later inherit it.
    """
    try:
        import resource
    except ImportError:
        return _WINDOWS_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return _MOST_FILES if soft == resource.RLIM_INFINITY else soft
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (OSError, ValueError):  # macOS has a further limit for one process
        return soft
    return wanted


def num_open_files() -> int:
    """Return how many files this process has open; 64 where the system does not list them."""
    try:
        return len(os.listdir("/dev/fd"))
    except OSError:
        return 64


def connections_under(file_limit: int, num_open: int, num_requests: int) -> int:
    """Return how many connections a server may have.

    Args:
        file_limit: files that the process may have open.
        num_open: files that are open before the first connection.
        num_requests: requests that may run and wait; there is room for two connections of each.
    """
    room = file_limit - num_open - min(_RESERVED_FILES, file_limit // 4)
    return max(_FEWEST_CONNECTIONS, min(room, max(_MOST_CONNECTIONS, 2 * num_requests)))
