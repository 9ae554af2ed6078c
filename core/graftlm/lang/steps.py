"""What a program state can be asked to do, beside its expressions."""

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
    """A state at one point of its program; as a step, what an empty state becomes.

    Attributes:
        role: of the message that is open.
        cached_len: characters of `text`, from its beginning, that the backend has computed before.
    """

    text: str = ""
    messages: tuple[dict[str, str], ...] = ()
    role: str | None = None
    cached_len: int = 0

    def since(self, start: "Snapshot") -> Written:
        """Return what a state has written that began as `start`.

        Raises:
            RequestError: it is in another message of its chat than at the beginning.
        """
        num_new = len(self.messages) - len(start.messages)
        if self.role != start.role or (self.role is not None and num_new):
            raise RequestError(
                f"a fork began in {_place(start.role)} and is joined in {_place(self.role)}; what is appended to its "
                "parent has to end the messages that it begins, and no other"
            )
        return Written(self.text[len(start.text) :], self.messages[len(start.messages) :])


@dataclass(frozen=True, slots=True)
class Take:
    """Asks for a snapshot. `shared`: several states go on from it, so its text is worth caching first."""

    taken: "Future[Snapshot]"
    shared: bool = False


@dataclass(frozen=True, slots=True)
class TakeWritten:
    """Asks for what a fork has written since it began."""

    taken: "Future[Expr]"


@dataclass(frozen=True, slots=True)
class Later:
    """Runs an expression that other states have a part in: when its turn comes, it is awaited."""

    expr: Callable[[], Awaitable[Expr]]


@dataclass(frozen=True, slots=True)
class End:
    """The program has nothing more to say to this state."""

    ended: "Future[None]"


#: What a state can be asked to do.
Action = Expr | Snapshot | Later | Take | TakeWritten | End


@dataclass(frozen=True, slots=True)
class Step:
    """One entry of the queue."""

    action: Action
    site: CallSite | None = None
    cell: Cell | None = None

    def fail(self, error: ProgramError) -> None:
        """Tell those who wait for it."""
        if self.cell is not None:
            self.cell.fail(error)
        match self.action:
            case Take(taken=future) | TakeWritten(taken=future) | End(ended=future) if not future.done():
                future.set_exception(error)


def _place(role: str | None) -> str:
    return "no message" if role is None else f"a message of {role}"
