"""The process's limit of open files, and the number of connections that the limit permits."""

import os
from typing import Final

__all__ = ["connections_under", "num_open_files", "raise_file_limit"]

#: The soft limit is not raised above this number, even if the hard limit is higher or unlimited.
_MOST_FILES: Final = 2**20
#: The limit that is assumed on Windows. There, a process cannot read its limit, and sockets do not count as files.
_WINDOWS_FILES: Final = 8192
#: Files reserved for weights, adapters, traces, sockets between the processes, and connections that are being closed.
_RESERVED_FILES: Final = 256
#: With this number of connections, the memory of connections that send no request stays below 400 MiB.
_MOST_CONNECTIONS: Final = 4096
_FEWEST_CONNECTIONS: Final = 16


def raise_file_limit() -> int:
    """Raise this process's soft limit of open files to the hard limit, but not above 2**20.

    Effects: processes that are started later inherit the limit.

    Returns: the limit in effect; 8192 on Windows.
    """
    try:
        import resource
    except ImportError:
        return _WINDOWS_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    target = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft == resource.RLIM_INFINITY or soft >= target:
        return _MOST_FILES if soft == resource.RLIM_INFINITY else soft
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))
    except (OSError, ValueError):  # macOS may refuse the hard limit, because it has a further limit per process
        return soft
    return target


def num_open_files() -> int:
    """Return the number of open files of this process; 64 if the system does not list them."""
    try:
        return len(os.listdir("/dev/fd"))
    except OSError:
        return 64


def connections_under(file_limit: int, num_open: int, num_requests: int) -> int:
    """Return the maximum number of connections of a server.

    Args:
        file_limit: maximum number of open files of the process.
        num_open: number of files that are open before the first connection.
        num_requests: maximum number of requests that run or wait. Two connections are reserved for each.
    """
    room = file_limit - num_open - min(_RESERVED_FILES, file_limit // 4)
    return max(_FEWEST_CONNECTIONS, min(room, max(_MOST_CONNECTIONS, 2 * num_requests)))
