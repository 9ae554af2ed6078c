"""Calls of compiled kernels, which can be listened to: what has been heard can be called again."""

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
    """Call a compiled kernel, and tell whoever listens in this thread.

    Every kernel that a model's `forward` calls by `ctypes` is called through here. Calling the function again with the
    same arguments must repeat its work on whatever then stands at the addresses among them.
    """
    result = function(*arguments)
    if _listening.listener is not None:
        _listening.listener(function, arguments, result)
    return result


@contextmanager
def heard_by(listener: Listener) -> Iterator[None]:
    """Tell a listener of this thread's calls meanwhile: of the function, of its arguments, and of what it returned."""
    before, _listening.listener = _listening.listener, listener
    try:
        yield
    finally:
        _listening.listener = before
