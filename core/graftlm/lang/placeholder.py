"""What stands for a value while a program is traced, and the marks by which it is found again in text."""

import re
import secrets
import sys
from collections.abc import Callable
from string import ascii_lowercase, ascii_uppercase
from typing import Any, Final, NoReturn, TypeGuard

from graftlm.errors import TraceError
from graftlm.lang.call_site import CallSite, call_site, error_at
from graftlm.lang.expressions import Expr
from graftlm.lang.template import TEXT_METHODS, Argument, MetaInfo, Produced, Slot, Source, Template

__all__ = ["Marks", "Placeholder"]

#: How marks begin, and end backwards. What takes text apart, strips it or escapes it hits one of these.
_EDGES: Final = ('\n"', "\t'")


class Marks:
    """Writes the placeholders of one trace into ordinary strings, and reads them out again.

    An f-string makes a plain `str`, so a placeholder in one leaves a mark there: a number in a frame that no program
    writes by chance. Python that works on such text cannot be told from Python that only passes it on, but most of it
    damages the frame (its white space, its quotes, or the case of its letters), and then `parse` says so; the rest
    mostly makes another text with marks of another kind.
    """

    def __init__(self, filename: str, kind: int) -> None:
        """Begin without any.

        Args:
            filename: of the traced program, whose lines errors name.
            kind: 0 or 1; marks of the one kind differ from those of the other in length and in every place.
        """
        self._filename = filename
        self._edge = _EDGES[kind]
        self._core = "".join(secrets.choice(ascii_lowercase) + secrets.choice(ascii_uppercase) for _ in range(8 + kind))
        self._whole = re.compile(f"{self._edge}{self._core}([0-9]+){self._edge[::-1]}")
        self._templates: list[Template] = []
        self.stopped: TraceError | None = None

    def write(self, template: Template) -> str:
        """Return a string that stands for a text with slots."""
        self._templates.append(template)
        return f"{self._edge}{self._core}{len(self._templates) - 1}{self._edge[::-1]}"

    def parse(self, text: str) -> tuple[str | Slot, ...]:
        """Return a string's text and slots, in order.

        Raises:
            TraceError: it holds what is left of a mark.
        """
        pieces = self._whole.split(text)
        parts: list[str | Slot] = []
        for i, piece in enumerate(pieces):
            if i % 2:
                parts += self._templates[int(piece)].parts
            elif self._core.casefold() in piece.casefold():
                self.stop("Python code has changed a text that holds a placeholder, such as by a slice, strip or split")
            elif piece:
                parts.append(piece)
        return tuple(parts)

    def structure(self, value: Any) -> Any:
        """Return what a program keeps or returns with Templates where it holds placeholders.

        Raises:
            TraceError: it is an object that could hide one.
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
                    f"the program keeps or returns {type(value).__name__}; a traced one can do so with texts, numbers, "
                    "lists, tuples and dicts"
                )

    def stop(self, what: str, site: CallSite | None = None) -> NoReturn:
        """Raise TraceError with the program's line. The trace remembers it, should the program catch it."""
        site = site or self._site()
        error = error_at(TraceError, f"the program cannot be traced: {what}", site)
        self.stopped = self.stopped or error
        raise error

    def _site(self) -> CallSite:
        """Return the innermost line of the program's file, or, where it is in none, outside the language."""
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
    """A value that is not known yet: an argument, or what a model will write.

    It can be appended, put together with text by `+`, formatted, indexed, and given to methods that make text of text
    (`strip`, `upper`, ...). Everything that would need the value raises TraceError.
    """

    __slots__ = ("_marks", "template")

    def __init__(self, marks: Marks, template: Template) -> None:
        self._marks = marks
        self.template = template

    @classmethod
    def of(cls, marks: Marks, source: Source) -> "Placeholder":
        """Return what stands for a source's value."""
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
    __hash__ = _refuse("hash(), as of a key or a variable's name,")
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
            self._stop(f"{operation} by another placeholder")
        if len(self.template.parts) == 1 and isinstance(slot := self.template.parts[0], Slot):
            return Template((slot.converted(operation, *arguments),))
        if operation == "str" or (operation == "format" and arguments == ("",)):
            return self.template
        return self._stop(f"{operation} of several texts together")

    def _joined(self, left: "str | Placeholder", right: "str | Placeholder") -> "Placeholder":
        return Placeholder(self._marks, Template((*self._parts(left), *self._parts(right))))

    def _parts(self, text: "str | Placeholder") -> tuple[str | Slot, ...]:
        return text.template.parts if isinstance(text, Placeholder) else self._marks.parse(text)

    def _stop(self, operation: str) -> NoReturn:
        slots = [part for part in self.template.parts if isinstance(part, Slot)]
        self._marks.stop(f"it asks for {operation} of {_described(slots[0].source)}")


def _is_text(value: object) -> "TypeGuard[str | Placeholder]":
    return isinstance(value, str | Placeholder)


def _described(source: Source) -> str:
    match source:
        case Argument(name):
            return f"its argument {name!r}, which is free; {name}=... of compile, trace or bind makes it a constant"
        case Produced() | MetaInfo():
            return "what a model has yet to write; run the program as it is, or do this with what it returns"
