"""Texts and values with slots, which a traced program uses before its arguments and the generated texts are known."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

from graftlm.errors import RequestError

__all__ = [
    "TEXT_METHODS",
    "Argument",
    "Conversion",
    "MetaInfo",
    "Produced",
    "Slot",
    "Source",
    "Template",
    "argument_names",
    "fill",
    "map_slots",
    "slots_of",
]

#: Methods of `str` that return a text; they can be called later, when the text is known.
TEXT_METHODS: Final = frozenset(
    {"capitalize", "lower", "lstrip", "removeprefix", "removesuffix", "replace", "rstrip", "strip", "title", "upper"}
)


@dataclass(frozen=True, slots=True)
class Argument:
    """An argument of the program."""

    name: str


@dataclass(frozen=True, slots=True)
class Produced:
    """The value of a node of the graph."""

    node_id: int


@dataclass(frozen=True, slots=True)
class MetaInfo:
    """The meta information of a node's value."""

    node_id: int


#: The source of a slot's value.
Source = Argument | Produced | MetaInfo


@dataclass(frozen=True, slots=True)
class Conversion:
    """An operation that the program applies to a value.

    A traced program records it, and a run of the graph applies it when the value is known.

    Attributes:
        operation: "str", "repr", "format", "item", or one of TEXT_METHODS.
        arguments: the operation's arguments; constants.
    """

    operation: str
    arguments: tuple[Any, ...] = ()

    def __call__(self, value: Any) -> Any:
        """Return the converted value; raises the same errors as Python's operation."""
        match self.operation:
            case "str":
                return str(value)
            case "repr":
                return repr(value)
            case "format":
                return format(value, *self.arguments)
            case "item":
                return value[self.arguments[0]]
            case method:
                return getattr(value, method)(*self.arguments)

    def __str__(self) -> str:
        shown = ", ".join(repr(argument) for argument in self.arguments)
        if self.operation == "item":
            return f"[{shown}]"
        return "" if self.operation == "format" and self.arguments == ("",) else f".{self.operation}({shown})"


@dataclass(frozen=True, slots=True)
class Slot:
    """A placeholder for a value."""

    source: Source
    conversions: tuple[Conversion, ...] = ()

    def value(self, value_of: Callable[[Source], Any]) -> Any:
        """Return the converted value of the source; `value_of` returns the value of a source."""
        value = value_of(self.source)
        for convert in self.conversions:
            value = convert(value)
        return value

    def converted(self, operation: str, *arguments: Any) -> "Slot":
        """Return a slot for the same value with one more conversion."""
        return replace(self, conversions=(*self.conversions, Conversion(operation, arguments)))


@dataclass(frozen=True, slots=True)
class Template:
    """Text with slots, in order. A template with a single slot and no text can have a value of any type."""

    parts: tuple[str | Slot, ...]

    def render(self, value_of: Callable[[Source], Any]) -> Any:
        """Return the text; or the slot's value, if the template is a single slot.

        Raises:
            RequestError: there are several parts, and one of them is no text.
        """
        values = [part if isinstance(part, str) else part.value(value_of) for part in self.parts]
        if len(values) == 1:
            return values[0]
        for part, value in zip(self.parts, values, strict=True):
            if not isinstance(value, str):
                raise RequestError(
                    f"text is joined with {type(value).__name__} {value!r} of {part}; use str(...) to make it a text"
                )
        return "".join(values)


def fill(structure: Any, value_of: Callable[[Source], Any]) -> Any:
    """Return a copy of lists, tuples and mappings in which every Template is rendered."""
    match structure:
        case Template():
            return structure.render(value_of)
        case list() | tuple():
            return type(structure)([fill(entry, value_of) for entry in structure])
        case dict():
            return {key: fill(entry, value_of) for key, entry in structure.items()}
        case _:
            return structure


def slots_of(structure: Any) -> Iterator[Slot]:
    """Yield the slots of every Template in lists, tuples and mappings."""
    match structure:
        case Template(parts):
            yield from (part for part in parts if isinstance(part, Slot))
        case list() | tuple():
            for entry in structure:
                yield from slots_of(entry)
        case dict():
            for entry in structure.values():
                yield from slots_of(entry)


def argument_names(structure: Any) -> list[str]:
    """Return the names of the arguments that a value depends on."""
    return [slot.source.name for slot in slots_of(structure) if isinstance(slot.source, Argument)]


def map_slots(structure: Any, change: Callable[[Slot], Any]) -> Any:
    """Return the structure with each slot replaced by the result of `change`: another slot, or a value."""
    match structure:
        case Template(parts):
            changed = [part if isinstance(part, str) else change(part) for part in parts]
            if any(isinstance(part, Slot) for part in changed):
                return Template(tuple(changed))
            return Template(tuple(changed)).render(_no_value)
        case list() | tuple():
            return type(structure)([map_slots(entry, change) for entry in structure])
        case dict():
            return {key: map_slots(entry, change) for key, entry in structure.items()}
        case _:
            return structure


def _no_value(source: Source) -> Any:
    raise AssertionError(f"{source} in a template without slots")
