"""The tool call format `pythonic`: an answer that is a list of Python calls."""

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
#: Maximum length of a list in characters. A longer list is content. Python's parser needs up to 10 µs and 200 bytes per
#: character.
_MAX_LEN: Final = 65_536
_BEGINNING: Final = re.compile(r"\s*\[\s*([\w.]*)\s*(\()?")
#: The text after a call if more calls may follow.
_SEPARATOR: Final = re.compile(r"\s*(?:,|\Z)")
#: JSON's names of Python values, which models also write.
_JSON_NAMES: Final[Mapping[str, Any]] = {"true": True, "false": False, "null": None}


class PythonicFormat(ToolCallFormat):
    """Calls are [f(a=1), g(b="x")]: keyword arguments whose values are literals. No code is evaluated."""

    def parser(self, tools: Sequence[Tool], *, enforced: bool) -> ToolCallParser:
        """Return a parser for one completion.

        Args:
            tools: the tools that may be called.
            enforced: whether a grammar enforces calls. If so, the parser returns each call when the call is complete.
                Otherwise it returns all calls when the list is complete.
        """
        return _PythonicParser(tools, enforced=enforced)

    def grammar(self, tools: Sequence[Tool], choice: ToolChoice, *, parallel: bool) -> CallGrammar | None:
        """Return an EBNF of the list if calls are required, otherwise None, because free text may start with "["."""
        return python_calls(tools, parallel=parallel) if choice is ToolChoice.REQUIRED else None

    def render(self, calls: Sequence[ToolCall]) -> str:
        """Write the list."""
        return f"[{', '.join(_render(call) for call in calls)}]"

    def instructions(self, tools: Sequence[Tool]) -> str:
        """Describe the tools and the list."""
        return describe_tools(tools, _HOW)


class _PythonicParser(ToolCallParser):
    """Holds back a list at the start of the text until it is complete; if enforced, only the current call."""

    def __init__(self, tools: Sequence[Tool], *, enforced: bool) -> None:
        self._names = {python_name(tool.name): tool.name for tool in tools}
        self._enforced = enforced
        self._message = MessageBuilder()
        self._scanner = BracketScanner(opening="([{", closing=")]}", quotes="\"'")
        self._held = ""  # text from the list's bracket on, or from the end of the last returned call on
        self._start = 0  # index of the first character that is not white space
        self._read = 0  # index up to which the scanner has read
        self._last_end = 0  # index after the last call that may be complete
        self._has_returned_call = False
        self._is_text = False

    def push(self, text: str) -> Sequence[MessageDelta]:
        if self._is_text:
            self._message.content(text)
        else:
            self._held += text
            while self._advance():
                pass
        return self._message.take()

    def finish(self) -> Sequence[MessageDelta]:
        if not self._is_text:
            self._message.content(self._held)
        return self._message.end()

    def cut_off(self) -> Sequence[MessageDelta]:
        if not self._is_text and not self._has_returned_call:
            if not self._may_be_calls():
                self._message.content(self._held)
            elif self._last_end and _SEPARATOR.match(self._held, self._last_end):
                self._add_calls(_calls(f"{self._held[: self._last_end].strip()}]", self._names) or ())
        return self._message.end()

    def _may_be_calls(self) -> bool:
        """Return whether the held text can be the start of a list of calls."""
        found = _BEGINNING.match(self._held)
        if found is None:
            return False
        name, bracket = found.groups()
        if bracket:
            return name in self._names
        return found.end() == len(self._held) and any(one.startswith(name) for one in self._names)

    def _advance(self) -> bool:
        """Read to the next closing bracket. Returns whether there is one and calls may follow it."""
        if not self._has_returned_call and not self._opens_list():
            return False
        end = self._scanner.find_closing(self._held, self._read, _MAX_LEN)
        self._read = min(len(self._held), _MAX_LEN) if end is None else end
        if end is None:
            if len(self._held) > _MAX_LEN:
                self._end_calls()
            return False
        if self._scanner.depth == 0:
            self._close_list(end)
        elif self._scanner.depth == 1:
            self._last_end = end
            if self._enforced:
                self._close_call(end)
        return not self._is_text

    def _opens_list(self) -> bool:
        """Return whether the held text starts with a bracket. If it starts with other text, treat it as content."""
        stop = min(len(self._held), _MAX_LEN)
        while self._start < stop and self._held[self._start].isspace():
            self._start += 1
        if self._start < stop and self._held[self._start] != "[":
            self._end_calls()
        return self._start < stop and not self._is_text

    def _close_call(self, end: int) -> None:
        """Return the call that ends at `end`. If the text is not a call, treat it and all later text as content."""
        item = self._held[:end].strip()
        is_next = not self._has_returned_call or item.startswith(",")
        calls = _calls(f"[{item[1:]}]", self._names) if is_next else None
        if calls is None:
            self._end_calls()
            return
        self._add_calls(calls)
        self._has_returned_call = True
        self._held, self._read = self._held[end:], 0

    def _close_list(self, end: int) -> None:
        """Return the calls of the list that ends at `end`, without the calls that were returned before."""
        if self._has_returned_call:
            if self._held[: end - 1].strip() in ("", ","):
                self._held = self._held[end:]
        else:
            calls = _calls(self._held[:end].strip(), self._names)
            if calls is not None:
                self._add_calls(calls)
                self._held = self._held[end:]
        self._end_calls()

    def _add_calls(self, calls: Sequence[ToolCall]) -> None:
        for call in calls:
            self._message.call(call.name)
            self._message.arguments(call.arguments)

    def _end_calls(self) -> None:
        """Treat the held text and all later text as content."""
        self._is_text = True
        self._message.content(self._held)


def _calls(text: str, names: Mapping[str, str]) -> list[ToolCall] | None:
    """Return the calls of a list; None if the text is not a list of calls."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python's parser may warn about the model's text
            tree = ast.parse(text, mode="eval").body
        if not isinstance(tree, ast.List) or not tree.elts:
            return None
        return [_call(node, names) for node in tree.elts]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _call(node: ast.expr, names: Mapping[str, str]) -> ToolCall:
    """Return the call of a node of the syntax tree.

    Raises:
        ValueError: the node is not a call of a tool, or has positional arguments.
    """
    name = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
    if not isinstance(node, ast.Call) or node.args or name not in names:
        raise ValueError("not a call of a tool with keyword arguments")
    arguments: dict[str, Any] = {}
    for keyword in node.keywords:
        value = _value(keyword.value)
        arguments |= value if keyword.arg is None else {keyword.arg: value}
    return ToolCall(names[name], dump(arguments))


def _value(node: ast.expr) -> Any:
    """Return the JSON value of a literal.

    Raises:
        ValueError: the node is not a literal of a JSON type.
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
    raise ValueError("not a literal of a JSON type")


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
