"""The expressions of a program, as plain data: text, generation, selection, roles, scopes."""

from __future__ import annotations

import os
from dataclasses import dataclass

from graftlm.errors import InvalidPromptError, ProgramError
from graftlm.lang.call_site import call_site, error_at
from graftlm.lang.choices import CallableMethod, ChoicesMethod
from graftlm.lang.sampling import Sampling

__all__ = [
    "Expr",
    "Gen",
    "Image",
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
    """An expression that can be appended to a program's state. `+` joins two expressions; strings are text."""

    __slots__ = ()

    def __add__(self, other: Expr | str) -> Sequence:
        return Sequence(_parts(self) + _parts(as_expr(other)))

    def __radd__(self, other: str) -> Sequence:
        return Sequence(_parts(as_expr(other)) + _parts(self))

    def __format__(self, spec: str) -> str:
        """Refuse formatting, because the string would contain the expression's repr instead of its value.

        Raises:
            ProgramError: always, with the program's line.
        """
        raise error_at(
            ProgramError,
            f'{type(self).__name__} is no text, so an f-string cannot contain it; append it with +: "..." + gen(...)',
            call_site(),
        )


@dataclass(frozen=True, slots=True)
class Text(Expr):
    """Constant text."""

    text: str


@dataclass(frozen=True, slots=True)
class Image(Expr):
    """A picture: the path of a file, or the content of one."""

    source: str | bytes | os.PathLike[str]


@dataclass(frozen=True, slots=True)
class Written(Expr):
    """Everything that a fork has appended: text, and the chat messages and the pictures in this text."""

    text: str
    messages: tuple[dict[str, str], ...] = ()
    images: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class Sequence(Expr):
    """A sequence of expressions."""

    parts: tuple[Expr, ...]


@dataclass(frozen=True, slots=True)
class Gen(Expr):
    """Text that the model generates; stored as the variable `name`, unless that is None.

    Attributes:
        reasoning: model type, if the reasoning is separated from the answer; None if the reasoning remains in the text.
        may_split: if the backend refuses a request for `n` completions, `n` requests may be sent instead.
    """

    name: str | None
    sampling: Sampling
    reasoning: str | None = None
    may_split: bool = False


@dataclass(frozen=True, slots=True)
class Select(Expr):
    """The most likely of some choices; stored as the variable `name`, unless that is None."""

    name: str | None
    choices: tuple[str, ...]
    method: ChoicesMethod | CallableMethod


@dataclass(frozen=True, slots=True)
class RoleBegin(Expr):
    """The beginning of a chat message."""

    role: str


@dataclass(frozen=True, slots=True)
class RoleEnd(Expr):
    """The end of a chat message."""

    role: str


@dataclass(frozen=True, slots=True)
class ScopeBegin(Expr):
    """The beginning of the text of the variable `name`."""

    name: str


@dataclass(frozen=True, slots=True)
class ScopeEnd(Expr):
    """The end of the text of the variable `name`."""

    name: str


def as_expr(value: Expr | str) -> Expr:
    """Return an expression; a string becomes Text.

    Raises:
        InvalidPromptError: the value is neither an expression nor a string.
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
