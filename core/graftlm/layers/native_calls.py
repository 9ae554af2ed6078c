"""Calls compiled kernels so that the calls can be recorded and repeated."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["call_native", "heard_by"]

Listener = Callable[[Callable[..., Any], tuple[Any, ...], object], None]


class _Listening(threading.local):
    listener: Listener | None = None


_listening = _Listening()


def call_native(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a compiled kernel, and pass the call to this thread's listener.

    Every kernel that a model's `forward` calls by `ctypes` is called through this function. A repeated call with the
    same arguments must do the same work on the current content of the memory at the given addresses.
    """
    result = function(*arguments)
    if _listening.listener is not None:
        _listening.listener(function, arguments, result)
    return result


@contextmanager
def heard_by(listener: Listener) -> Iterator[None]:
    """Pass this thread's calls to a listener while the context is open: function, arguments and result."""
    before, _listening.listener = _listening.listener, listener
    try:
        yield
    finally:
        _listening.listener = before
