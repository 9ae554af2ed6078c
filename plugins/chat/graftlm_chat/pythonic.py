"""`pythonic`: an answer that is a list of Python calls."""

import ast
import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Final

from graftlm.contracts import (
    CallGrammar,
    MessageDelta,
    Tool,
    ToolCall,
    ToolCallFormat,
    ToolCallParser,
    ToolChoice,
)
from graftlm_chat.json_text import BracketScanner, dump
from graftlm_chat.message_builder import MessageBuilder
from graftlm_chat.pythonic_grammar import is_argument, python_calls, python_name
from graftlm_chat.wording import describe_tools

__all__ = ["PythonicFormat"]

_HOW: Final = "To call some, answer with nothing but a list of Python calls: [name(argument=value, ...), ...]."
#: Characters; longer lists are content. Python's parser takes up to 10 µs for each, and 200 bytes.
_MAX_LEN: Final = 65_536
_BEGINNING: Final = re.compile(r"\s*\[\s*([\w.]*)\s*(\()?")
#: What follows a call that others may follow.
_SEPARATOR: Final = re.compile(r"\s*(?:,|\Z)")
#: JSON's names of Python's values, which models write as well.
_JSON_NAMES: Final[Mapping[str, Any]] = {"true": True, "false": False, "null": None}


class PythonicFormat(ToolCallFormat):
    """[f(a=1), g(b="x")]: calls by keyword, whose values are literals. Nothing is evaluated."""

    def parser(self, tools: Sequence[Tool], *, enforced: bool) -> ToolCallParser:
        """Return a parser, which tells the calls once the list is complete, or if enforced, each once it is."""
        return _PythonicParser(tools, enforced=enforced)

    def grammar(self, tools: Sequence[Tool], choice: ToolChoice, *, parallel: bool) -> CallGrammar | None:
        """Return an EBNF of the list; nothing where the model may choose, since any text may begin with a bracket."""
        return python_calls(tools, parallel=parallel) if choice is ToolChoice.REQUIRED else None

    def render(self, calls: Sequence[ToolCall]) -> str:
        """Write the list."""
        return f"[{', '.join(_render(call) for call in calls)}]"

    def instructions(self, tools: Sequence[Tool]) -> str:
        """Describe the tools and the list."""
        return describe_tools(tools, _HOW)


class _PythonicParser(ToolCallParser):
    """Holds back a list at the beginning of the text: until it is complete, or if enforced, each call until it is."""

    def __init__(self, tools: Sequence[Tool], *, enforced: bool) -> None:
        self._names = {python_name(tool.name): tool.name for tool in tools}
        self._enforced = enforced
        self._message = MessageBuilder()
        self._scanner = BracketScanner(opening="([{", closing=")]}", quotes="\"'")
        self._held = ""  # from the list's bracket, or from the end of the last call that was told
        self._start = 0  # of what is no white space
        self._read = 0
        self._last_end = 0  # of what may be the last complete call
        self._has_told = False
        self._is_text = False

    def push(self, text: str) -> Sequence[MessageDelta]:
        if self._is_text:
            self._message.content(text)
        else:
            self._held += text
            while self._read_on():
                pass
        return self._message.take()

    def finish(self) -> Sequence[MessageDelta]:
        if not self._is_text:
            self._message.content(self._held)
        return self._message.end()

    def cut_off(self) -> Sequence[MessageDelta]:
        if not self._is_text and not self._has_told:
            if not self._may_be_calls():
                self._message.content(self._held)
            elif self._last_end and _SEPARATOR.match(self._held, self._last_end):
                self._tell(_calls(f"{self._held[: self._last_end].strip()}]", self._names) or ())
        return self._message.end()

    def _may_be_calls(self) -> bool:
        """Whether what is held may go on as a list of calls."""
        found = _BEGINNING.match(self._held)
        if found is None:
            return False
        name, bracket = found.groups()
        if bracket:
            return name in self._names
        return found.end() == len(self._held) and any(one.startswith(name) for one in self._names)

    def _read_on(self) -> bool:
        """Read up to the next bracket that closes; returns whether there is one, and what follows may be calls."""
        if not self._has_told and not self._opens_list():
            return False
        end = self._scanner.find_closing(self._held, self._read, _MAX_LEN)
        self._read = min(len(self._held), _MAX_LEN) if end is None else end
        if end is None:
            if len(self._held) > _MAX_LEN:
                self._go_on_as_text()
            return False
        if self._scanner.depth == 0:
            self._close_list(end)
        elif self._scanner.depth == 1:
            self._last_end = end
            if self._enforced:
                self._close_call(end)
        return not self._is_text

    def _opens_list(self) -> bool:
        """Whether what is held begins with a bracket; text that begins otherwise is content."""
        stop = min(len(self._held), _MAX_LEN)
        while self._start < stop and self._held[self._start].isspace():
            self._start += 1
        if self._start < stop and self._held[self._start] != "[":
            self._go_on_as_text()
        return self._start < stop and not self._is_text

    def _close_call(self, end: int) -> None:
        """Tell the call that ends here; what is none is content from here on."""
        item = self._held[:end].strip()
        is_next = not self._has_told or item.startswith(",")
        calls = _calls(f"[{item[1:]}]", self._names) if is_next else None
        if calls is None:
            self._go_on_as_text()
            return
        self._tell(calls)
        self._has_told = True
        self._held, self._read = self._held[end:], 0

    def _close_list(self, end: int) -> None:
        """Tell the calls of the list that ends here, those that were not told yet."""
        if self._has_told:
            if self._held[: end - 1].strip() in ("", ","):
                self._held = self._held[end:]
        else:
            calls = _calls(self._held[:end].strip(), self._names)
            if calls is not None:
                self._tell(calls)
                self._held = self._held[end:]
        self._go_on_as_text()

    def _tell(self, calls: Sequence[ToolCall]) -> None:
        for call in calls:
            self._message.call(call.name)
            self._message.arguments(call.arguments)

    def _go_on_as_text(self) -> None:
        self._is_text = True
        self._message.content(self._held)


def _calls(text: str, names: Mapping[str, str]) -> list[ToolCall] | None:
    """Return the calls of a list; None when it is anything else."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python's, about the style of what the model wrote
            tree = ast.parse(text, mode="eval").body
        if not isinstance(tree, ast.List) or not tree.elts:
            return None
        return [_call(node, names) for node in tree.elts]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _call(node: ast.expr, names: Mapping[str, str]) -> ToolCall:
    """Return the call that a node stands for.

    Raises:
        ValueError: it is none of a tool's, by keyword.
    """
    name = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
    if not isinstance(node, ast.Call) or node.args or name not in names:
        raise ValueError("not a tool's call by keyword")
    arguments: dict[str, Any] = {}
    for keyword in node.keywords:
        value = _value(keyword.value)
        arguments |= value if keyword.arg is None else {keyword.arg: value}
    return ToolCall(names[name], dump(arguments))


def _value(node: ast.expr) -> Any:
    """Return the JSON value of a literal.

    Raises:
        ValueError: it is none.
    """
    match node:
        case ast.Constant(value=bool() | int() | str() | None as value):
            return value
        case ast.Constant(value=float() as number) if abs(number) != float("inf"):
            return number
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
            return -_value(ast.Constant(number))
        case ast.Name(id=name) if name in _JSON_NAMES:
            return _JSON_NAMES[name]
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_value(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            return {_key(key): _value(value) for key, value in zip(keys, values, strict=True)}
    raise ValueError("not a literal of JSON's types")


def _key(node: ast.expr | None) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    raise ValueError("not a string")


def _render(call: ToolCall) -> str:
    values = call.values()
    plain = {name: value for name, value in values.items() if is_argument(name)}
    others = {name: value for name, value in values.items() if name not in plain}
    arguments = [f"{name}={value!r}" for name, value in plain.items()]
    if others:
        arguments.append(f"**{others!r}")
    return f"{python_name(call.name)}({', '.join(arguments)})"
