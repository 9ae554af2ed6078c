"""What a program state can be asked to do, beside its expressions."""

from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from dataclasses import dataclass

from graftlm.errors import ProgramError
from graftlm.lang.call_site import CallSite
from graftlm.lang.expressions import Expr
from graftlm.lang.variables import Cell

__all__ = ["Action", "End", "Later", "Snapshot", "Step", "Take"]


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


@dataclass(frozen=True, slots=True)
class Take:
    """Asks for a snapshot. `shared`: several states go on from it, so its text is worth caching first."""

    taken: "Future[Snapshot]"
    shared: bool = False


@dataclass(frozen=True, slots=True)
class Later:
    """Runs an expression that other states have a part in: when its turn comes, it is awaited."""

    expr: Callable[[], Awaitable[Expr]]


@dataclass(frozen=True, slots=True)
class End:
    """The program has nothing more to say to this state."""

    ended: "Future[None]"


#: What a state can be asked to do.
Action = Expr | Snapshot | Later | Take | End


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
            case Take(taken=future) | End(ended=future) if not future.done():
                future.set_exception(error)
