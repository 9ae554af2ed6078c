"""Placeholders for unknown values while a program is traced, and the marks that represent them in strings."""

import re
import secrets
import string
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final, NoReturn, TypeGuard

from graftlm.errors import TraceError
from graftlm.lang.call_site import CallSite, call_site, error_at
from graftlm.lang.expressions import Expr
from graftlm.lang.template import TEXT_METHODS, Argument, MetaInfo, Produced, Slot, Source, Template

__all__ = ["MarkKind", "Marks", "Placeholder", "mark_kinds"]

#: Number of times that a long mark contains each character of `string.printable`, on each side.
_NUM_REPEATS: Final = 5


@dataclass(frozen=True, slots=True)
class MarkKind:
    """The format of the marks of one trace: padding, secret, number, padding; number and secret share an alphabet.

    Attributes:
        alphabet: code points.
        secret_len, number_len: lengths of the secret and of the number, in characters.
        before, after: the paddings.
    """

    alphabet: range
    secret_len: int
    number_len: int
    before: str = ""
    after: str = ""

    def number(self, value: int) -> str:
        """Return a number as text, written in the alphabet."""
        digits = []
        for _ in range(self.number_len):
            value, digit = divmod(value, len(self.alphabet))
            digits.append(chr(self.alphabet[digit]))
        return "".join(digits)

    def value(self, number: str) -> int:
        """Return the value of a text that `number` has returned."""
        digits = [self.alphabet.index(ord(letter)) for letter in number]
        return sum(digit * len(self.alphabet) ** i for i, digit in enumerate(digits))

    def secret(self) -> str:
        """Return random characters that no other text contains; "" if no other text uses the alphabet."""
        return "".join(chr(secrets.choice(self.alphabet)) for _ in range(self.secret_len))

    def pattern(self, secret: str) -> re.Pattern[str]:
        """Return a pattern that matches marks; its group is the number."""
        letters = f"[{chr(min(self.alphabet))}-{chr(max(self.alphabet))}]"
        before, after = re.escape(self.before + secret), re.escape(self.after)
        return re.compile(f"{before}({letters}{{{self.number_len}}}){after}")


def mark_kinds(literals: Iterable[str]) -> tuple[MarkKind, ...]:
    """Return kinds of marks that differ as much as possible, so that code that inspects a text reacts differently.

    One kind contains every printable ASCII character and the program's own strings. The other kinds consist only of
    small letters, capitals, digits or white space. So code that splits a text, changes it, or tests its characters has
    different results for different kinds. For code that uses a text's length, there are marks of one character and of
    more than a thousand.

    Args:
        literals: the program's own strings; the program may search texts for them.
    """
    mixed = f"ä€{string.printable}" * _NUM_REPEATS
    return (
        MarkKind(range(ord("a"), ord("z") + 1), 12, 4),
        MarkKind(range(ord("a"), ord("z") + 1), 12, 4, before="\n" + " ".join([*literals, mixed]), after=mixed),
        MarkKind(range(ord("A"), ord("Z") + 1), 12, 4),
        MarkKind(range(ord("0"), ord("9") + 1), 16, 6),
        MarkKind(range(0x2000, 0x200B), 18, 6),  # spaces of several widths
        MarkKind(range(0x10FFFD, 0x103000, -1), 0, 1),  # private-use characters, which other texts do not contain
    )


class Marks:
    """Writes the placeholders of one trace as marks into ordinary strings, and finds them again.

    An f-string creates a plain `str`, so a placeholder in it becomes a mark. Python code that processes such a text is
    not recorded. But its result depends on the kind of marks, so the traces differ, and `trace` raises an error. If
    code changes a mark but not its secret, `parse` raises immediately.
    """

    def __init__(self, filename: str, kind: MarkKind) -> None:
        """Begin without marks.

        Args:
            filename: file of the traced program; errors name a line in it.
        """
        self._filename = filename
        self._kind = kind
        self._secret = kind.secret()
        self._whole = kind.pattern(self._secret)
        self._templates: list[Template] = []
        self.stopped: TraceError | None = None

    def write(self, template: Template) -> str:
        """Return a mark for a text with slots.

        Raises:
            TraceError: no further marks are available.
        """
        if len(self._templates) == len(self._kind.alphabet) ** self._kind.number_len:
            self.stop(f"it converts placeholders to text more than {len(self._templates)} times")
        self._templates.append(template)
        number = self._kind.number(len(self._templates) - 1)
        return f"{self._kind.before}{self._secret}{number}{self._kind.after}"

    def parse(self, text: str) -> tuple[str | Slot, ...]:
        """Return a string's text and slots, in order.

        Raises:
            TraceError: the string contains a part of a mark.
        """
        parts: list[str | Slot] = []
        for i, piece in enumerate(self._whole.split(text)):
            if i % 2:
                parts += self._template(piece).parts
            elif self._secret and self._secret.casefold() in piece.casefold():
                self._stop_changed()
            elif piece:
                parts.append(piece)
        return tuple(parts)

    def _template(self, number: str) -> Template:
        value = self._kind.value(number)
        return self._templates[value] if value < len(self._templates) else self._stop_changed()

    def _stop_changed(self) -> NoReturn:
        self.stop("Python code has changed a text that contains a placeholder, for example by a slice, strip or split")

    def structure(self, value: Any) -> Any:
        """Return a variable or return value of a program, with its placeholders replaced by Templates.

        Raises:
            TraceError: the value has an unsupported type; such an object might contain placeholders.
        """
        match value:
            case Placeholder():
                return value.template
            case str():
                parts = self.parse(value)
                return Template(parts) if any(isinstance(part, Slot) for part in parts) else value
            case list() | tuple() if type(value) in (list, tuple):
                return type(value)([self.structure(entry) for entry in value])
            case dict() if type(value) is dict:
                return {key: self.structure(entry) for key, entry in value.items()}
            case None | bool() | int() | float() | bytes():
                return value
            case _:
                return self.stop(
                    f"it stores or returns {type(value).__name__}; supported are texts, numbers, lists, tuples and "
                    "dicts"
                )

    def stop(self, what: str, site: CallSite | None = None) -> NoReturn:
        """Raise TraceError with the program's line; store it in `stopped`, in case the program catches it."""
        site = site or self._site()
        error = error_at(TraceError, f"the program cannot be traced: {what}", site)
        self.stopped = self.stopped or error
        raise error

    def _site(self) -> CallSite:
        """Return the innermost line in the program's file; without one, the innermost line outside the language."""
        frame = sys._getframe(1)
        while frame is not None:
            if frame.f_code.co_filename == self._filename:
                return CallSite(self._filename, frame.f_lineno, frame.f_code.co_name)
            if frame.f_back is None:
                break
            frame = frame.f_back
        return call_site()


def _refuse(operation: str) -> Callable[..., Any]:
    def method(self: "Placeholder", *_: object) -> NoReturn:
        self._stop(operation)

    return method


class Placeholder(Expr):
    """A value that is not known yet: an argument, or generated text.

    It can be appended, joined with text by `+`, formatted and indexed, and has some methods of `str` (`strip`, `upper`,
    ...). Every operation that needs the value raises TraceError.
    """

    __slots__ = ("_marks", "template")

    def __init__(self, marks: Marks, template: Template) -> None:
        self._marks = marks
        self.template = template

    @classmethod
    def of(cls, marks: Marks, source: Source) -> "Placeholder":
        """Return a placeholder for a source's value."""
        return cls(marks, Template((Slot(source),)))

    def __format__(self, spec: str) -> str:
        return self._marks.write(self._converted("format", spec))

    def __str__(self) -> str:
        return self._marks.write(self._converted("str"))

    def __repr__(self) -> str:
        return self._marks.write(self._converted("repr"))

    def __getitem__(self, key: Any) -> "Placeholder":
        return Placeholder(self._marks, self._converted("item", key))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name not in TEXT_METHODS:
            self._stop(f".{name}")
        return lambda *arguments: Placeholder(self._marks, self._converted(name, *arguments))

    def __add__(self, other: Any) -> Any:
        if _is_text(other):
            return self._joined(self, other)
        return super().__add__(other) if isinstance(other, Expr) else self._stop(f"+ {type(other).__name__}")

    def __radd__(self, other: Any) -> Any:
        return self._joined(other, self) if _is_text(other) else self._stop(f"+ {type(other).__name__}")

    __bool__ = _refuse("bool()")
    __len__ = _refuse("len()")
    __iter__ = _refuse("iteration")
    __contains__ = _refuse("in")
    __hash__ = _refuse("hash() (for a key or a variable's name)")
    __eq__ = _refuse("==")
    __ne__ = _refuse("!=")
    __lt__ = __gt__ = _refuse("an ordering")
    __le__ = __ge__ = _refuse("an ordering")
    __int__ = _refuse("int()")
    __float__ = _refuse("float()")
    __complex__ = _refuse("complex()")
    __index__ = _refuse("a whole number")
    __round__ = __trunc__ = __floor__ = __ceil__ = _refuse("rounding")
    __call__ = _refuse("a call")
    __neg__ = __pos__ = __abs__ = __invert__ = _refuse("arithmetic")
    __sub__ = __rsub__ = __mul__ = __rmul__ = _refuse("arithmetic")
    __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = _refuse("arithmetic")
    __mod__ = __rmod__ = __pow__ = __rpow__ = __divmod__ = __rdivmod__ = _refuse("arithmetic")
    __and__ = __rand__ = __or__ = __ror__ = __xor__ = __rxor__ = _refuse("arithmetic")

    def _converted(self, operation: str, *arguments: Any) -> Template:
        if any(isinstance(argument, Placeholder) for argument in arguments):
            self._stop(f"{operation} with another placeholder as argument")
        if len(self.template.parts) == 1 and isinstance(slot := self.template.parts[0], Slot):
            return Template((slot.converted(operation, *arguments),))
        if operation == "str" or (operation == "format" and arguments == ("",)):
            return self.template
        return self._stop(f"{operation} of several joined texts")

    def _joined(self, left: "str | Placeholder", right: "str | Placeholder") -> "Placeholder":
        return Placeholder(self._marks, Template((*self._parts(left), *self._parts(right))))

    def _parts(self, text: "str | Placeholder") -> tuple[str | Slot, ...]:
        return text.template.parts if isinstance(text, Placeholder) else self._marks.parse(text)

    def _stop(self, operation: str) -> NoReturn:
        slots = [part for part in self.template.parts if isinstance(part, Slot)]
        self._marks.stop(f"it uses {operation} on {_described(slots[0].source)}")


def _is_text(value: object) -> "TypeGuard[str | Placeholder]":
    return isinstance(value, str | Placeholder)


def _described(source: Source) -> str:
    match source:
        case Argument(name):
            return f"its argument {name!r}, which is free; {name}=... of compile, trace or bind makes it a constant"
        case Produced() | MetaInfo():
            return "text that is not generated yet; run the program without tracing, or do this with its return value"
