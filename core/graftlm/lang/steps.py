"""The actions in a program state's queue that are not expressions."""

from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from dataclasses import dataclass

from graftlm.errors import ProgramError, RequestError
from graftlm.lang.call_site import CallSite
from graftlm.lang.expressions import Expr, Written
from graftlm.lang.variables import Cell

__all__ = ["Action", "End", "Later", "Snapshot", "Step", "Take", "TakeWritten"]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A state at one point of its program; as an action, it is copied into an empty state.

    Attributes:
        role: role of the open message; None if no message is open.
        cached_len: number of leading characters of `text` that the backend has already computed.
        images: the contents of the pictures in `text`, in order.
    """

    text: str = ""
    messages: tuple[dict[str, str], ...] = ()
    role: str | None = None
    cached_len: int = 0
    images: tuple[bytes, ...] = ()

    def since(self, start: "Snapshot") -> Written:
        """Return everything that was appended since the snapshot `start`.

        Raises:
            RequestError: the open chat message is not the same as in `start`.
        """
        num_new = len(self.messages) - len(start.messages)
        if self.role != start.role or (self.role is not None and num_new):
            raise RequestError(
                f"a fork began in {_place(start.role)} and is joined in {_place(self.role)}; a fork that is appended "
                "to its parent must end each message that it begins, and no other message"
            )
        new_images = self.images[len(start.images) :]
        return Written(self.text[len(start.text) :], self.messages[len(start.messages) :], new_images)


@dataclass(frozen=True, slots=True)
class Take:
    """Takes a snapshot. If `shared` is set, several states continue from it, so the backend caches its text first."""

    taken: "Future[Snapshot]"
    shared: bool = False


@dataclass(frozen=True, slots=True)
class TakeWritten:
    """Reads everything that a fork has appended since it began."""

    taken: "Future[Expr]"


@dataclass(frozen=True, slots=True)
class Later:
    """Runs an expression that depends on other states; it is awaited when it is first in the queue."""

    expr: Callable[[], Awaitable[Expr]]


@dataclass(frozen=True, slots=True)
class End:
    """Marks the end of the queue: the program appends no more expressions."""

    ended: "Future[None]"


#: Every action of a state's queue.
Action = Expr | Snapshot | Later | Take | TakeWritten | End


@dataclass(frozen=True, slots=True)
class Step:
    """One entry of the queue."""

    action: Action
    site: CallSite | None = None
    cell: Cell | None = None

    def fail(self, error: ProgramError) -> None:
        """Set the error in the step's cell or future."""
        if self.cell is not None:
            self.cell.fail(error)
        match self.action:
            case Take(taken=future) | TakeWritten(taken=future) | End(ended=future) if not future.done():
                future.set_exception(error)


def _place(role: str | None) -> str:
    return "no message" if role is None else f"a message of {role}"
