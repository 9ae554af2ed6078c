"""The process's limit of open files, and the number of connections that it permits."""

import os
from typing import Final

__all__ = ["connections_under", "num_open_files", "raise_file_limit"]

#: The soft limit is not raised above this, even if the hard limit is higher or unlimited.
_MOST_FILES: Final = 2**20
#: Windows has no limit that a process can read, and its sockets are not files of the C library.
_WINDOWS_FILES: Final = 8192
#: Files kept free for weights, adapters, traces, sockets between the processes, and connections that are being closed.
_RESERVED_FILES: Final = 256
#: With this limit, the memory of connections that send no request stays below 400 MiB.
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
    except (OSError, ValueError):  # macOS has a further limit per process
        return soft
    return target


def num_open_files() -> int:
    """Return the number of files that this process has open; 64 where the system does not list them."""
    try:
        return len(os.listdir("/dev/fd"))
    except OSError:
        return 64


def connections_under(file_limit: int, num_open: int, num_requests: int) -> int:
    """Return the number of connections that a server may have.

    Args:
        file_limit: files that the process may have open.
        num_open: files that are open before the first connection.
        num_requests: requests that may run or wait at the same time; two connections are planned for each.
    """
    room = file_limit - num_open - min(_RESERVED_FILES, file_limit // 4)
    return max(_FEWEST_CONNECTIONS, min(room, max(_MOST_CONNECTIONS, 2 * num_requests)))
