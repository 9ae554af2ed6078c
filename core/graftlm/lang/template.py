"""Text and values with slots: what a traced program writes or returns before its arguments and answers are known."""

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

#: Methods of text that make text, and so can wait until the text is known.
TEXT_METHODS: Final = frozenset(
    {"capitalize", "lower", "lstrip", "removeprefix", "removesuffix", "replace", "rstrip", "strip", "title", "upper"}
)


@dataclass(frozen=True, slots=True)
class Argument:
    """An argument of the program."""

    name: str


@dataclass(frozen=True, slots=True)
class Produced:
    """What a node of the graph leaves in its variable."""

    node_id: int


@dataclass(frozen=True, slots=True)
class MetaInfo:
    """What the backend says of a node's variable."""

    node_id: int


#: Where a slot's value comes from.
Source = Argument | Produced | MetaInfo


@dataclass(frozen=True, slots=True)
class Conversion:
    """What the program does to a value on its way into a text.

    Attributes:
        operation: "str", "repr", "format", "item", or one of TEXT_METHODS.
        arguments: constants, as the program gave them.
    """

    operation: str
    arguments: tuple[Any, ...] = ()

    def __call__(self, value: Any) -> Any:
        """Return the value converted; raises what Python does."""
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
    """A place for a value."""

    source: Source
    conversions: tuple[Conversion, ...] = ()

    def value(self, value_of: Callable[[Source], Any]) -> Any:
        """Return what stands here, given the values of all sources."""
        value = value_of(self.source)
        for convert in self.conversions:
            value = convert(value)
        return value

    def converted(self, operation: str, *arguments: Any) -> "Slot":
        """Return a slot for the same value with one more conversion."""
        return replace(self, conversions=(*self.conversions, Conversion(operation, arguments)))


@dataclass(frozen=True, slots=True)
class Template:
    """Text with slots, in order; without text and with one slot, whatever value that has."""

    parts: tuple[str | Slot, ...]

    def render(self, value_of: Callable[[Source], Any]) -> Any:
        """Return the text, or the only slot's value.

        Raises:
            RequestError: a slot beside others holds something else than text.
        """
        values = [part if isinstance(part, str) else part.value(value_of) for part in self.parts]
        if len(values) == 1:
            return values[0]
        for part, value in zip(self.parts, values, strict=True):
            if not isinstance(value, str):
                raise RequestError(
                    f"text is put together with {type(value).__name__} {value!r} of {part}; write str(...) around it"
                )
        return "".join(values)


def fill(structure: Any, value_of: Callable[[Source], Any]) -> Any:
    """Return lists, tuples and mappings with every Template in them rendered."""
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
    """Return the structure with other slots, or with values where `change` knows them already."""
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
