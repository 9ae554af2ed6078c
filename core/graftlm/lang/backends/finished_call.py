"""Methods of a backend that the language awaits, and that programs may also call without await, as in SGLang."""

from collections.abc import Coroutine, Generator
from types import TracebackType
from typing import Any, Generic, NoReturn, TypeVar

from graftlm.lang.event_loop import is_in_shared_loop, wait_in_shared_loop

__all__ = ["run_unless_in_loop"]

T = TypeVar("T")


def run_unless_in_loop(coroutine: Coroutine[Any, Any, T]) -> Coroutine[Any, Any, T]:
    """Return the coroutine if the caller runs in the language's event loop; this caller must await it.

    For any other caller, this function runs the coroutine and waits for its end. The result is then a finished
    coroutine, which the caller may await, but need not.
    """
    if is_in_shared_loop():
        return coroutine
    return _FinishedCall(wait_in_shared_loop(coroutine))


class _FinishedCall(Coroutine[Any, Any, T], Generic[T]):
    """A coroutine that already has its result. Unlike a native coroutine, it causes no warning if it is not awaited."""

    def __init__(self, result: T) -> None:
        self._result = result

    def send(self, value: Any) -> NoReturn:
        """End with the result."""
        raise StopIteration(self._result)

    def throw(
        self,
        typ: type[BaseException] | BaseException,
        val: BaseException | object = None,
        tb: TracebackType | None = None,
    ) -> NoReturn:
        """Raise the error."""
        raise typ

    def close(self) -> None:
        """Do nothing: the call has finished."""

    def __await__(self) -> Generator[Any, Any, T]:
        return self._result
        yield
