"""What a program says, as plain data: text, generation, selection, roles, scopes."""

from __future__ import annotations

from dataclasses import dataclass

from graftlm.errors import InvalidPromptError, ProgramError
from graftlm.lang.call_site import call_site, error_at
from graftlm.lang.choices import ChoicesMethod
from graftlm.lang.sampling import Sampling

__all__ = [
    "Expr",
    "Gen",
    "RoleBegin",
    "RoleEnd",
    "ScopeBegin",
    "ScopeEnd",
    "Select",
    "Sequence",
    "Text",
    "Written",
    "as_expr",
]


class Expr:
    """Something that can be appended to a program's state. `+` puts one behind another; strings are text."""

    __slots__ = ()

    def __add__(self, other: Expr | str) -> Sequence:
        return Sequence(_parts(self) + _parts(as_expr(other)))

    def __radd__(self, other: str) -> Sequence:
        return Sequence(_parts(as_expr(other)) + _parts(self))

    def __format__(self, spec: str) -> str:
        """Refuse: in a string, only its repr would be left of the expression.

        Raises:
            ProgramError: always; with the program's line.
        """
        raise error_at(
            ProgramError,
            f"an f-string makes text of {type(self).__name__}, which is none; put it behind the text by +: "
            '"..." + gen(...)',
            call_site(),
        )


@dataclass(frozen=True, slots=True)
class Text(Expr):
    """Constant text."""

    text: str


@dataclass(frozen=True, slots=True)
class Written(Expr):
    """What a fork has written: its text, and the messages of a chat that the text holds."""

    text: str
    messages: tuple[dict[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Sequence(Expr):
    """Expressions, one after the other."""

    parts: tuple[Expr, ...]


@dataclass(frozen=True, slots=True)
class Gen(Expr):
    """Text that the model writes; kept as the variable `name` when there is one.

    Attributes:
        reasoning: kind of the model whose reasoning is kept apart; None leaves it in the text.
        may_split: its `n` completions may be asked for one by one, where the backend refuses so many in one request.
    """

    name: str | None
    sampling: Sampling
    reasoning: str | None = None
    may_split: bool = False


@dataclass(frozen=True, slots=True)
class Select(Expr):
    """The choice that the model finds most likely; kept as the variable `name` when there is one."""

    name: str | None
    choices: tuple[str, ...]
    method: ChoicesMethod


@dataclass(frozen=True, slots=True)
class RoleBegin(Expr):
    """The beginning of a message of a chat."""

    role: str


@dataclass(frozen=True, slots=True)
class RoleEnd(Expr):
    """The end of a message of a chat."""

    role: str


@dataclass(frozen=True, slots=True)
class ScopeBegin(Expr):
    """From here on, text belongs to the variable `name`."""

    name: str


@dataclass(frozen=True, slots=True)
class ScopeEnd(Expr):
    """The end of the variable `name`."""

    name: str


def as_expr(value: Expr | str) -> Expr:
    """Return an expression; strings are text.

    Raises:
        InvalidPromptError: it is neither.
    """
    if isinstance(value, Expr):
        return value
    if isinstance(value, str):
        return Text(value)
    raise InvalidPromptError(
        f"a program's state takes text and expressions such as gen(...), got {type(value).__name__} {value!r}; "
        "write str(...) around other values"
    )


def _parts(expr: Expr) -> tuple[Expr, ...]:
    return expr.parts if isinstance(expr, Sequence) else (expr,)
