"""Reads one JSON object that calls a tool, while it is generated."""

import re
from collections.abc import Collection
from typing import Any, Final

from graftlm.contracts import ToolCall
from graftlm_chat.json_text import BracketScanner, dump, load_object

__all__ = ["CallReader"]

#: Keys of a call's arguments. Each format accepts both keys, because models confuse them.
_ARGUMENT_KEYS: Final = ("arguments", "parameters")
_HEAD: Final = re.compile(r'\{\s*"name"\s*:\s*"([\w.-]+)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)', re.ASCII)
_BEGINNING: Final = re.compile(r'\{\s*(?:"([a-z]*)(?:(")\s*(?::\s*(?:"([\w.-]*)(")?)?)?)?)?', re.ASCII)
#: Maximum length of a call's head, in characters. A call with a longer head is reported only when it is complete.
_MAX_HEAD_LEN: Final = 1024


class CallReader:
    """Reads {"name": ..., "arguments": {...}}, starting at its first brace.

    Attributes:
        begun: the tool's name if it is certain that the object is a call; None before that.
        text: the text read so far.
    """

    def __init__(self, names: Collection[str], *, enforced: bool) -> None:
        """Start before the first brace.

        Args:
            names: names of the tools.
            enforced: whether a grammar enforces calls. If so, a call is certain as soon as its arguments start.
                Otherwise it is certain only when the object is complete.
        """
        self.begun: str | None = None
        self.text = ""
        self._names = names
        self._enforced = enforced
        self._scanner = BracketScanner()
        self._read = 0
        self._told = 0
        self._arguments: tuple[int, int | None] | None = None
        self._whole: ToolCall | None = None

    def push(self, text: str) -> str | None:
        """Read more text. Returns the text after the object, or None if the object is not complete."""
        self.text += text
        if self._arguments is None and self._read <= _MAX_HEAD_LEN:
            self._find_head()
        if self._arguments is not None and self._arguments[1] is None and not self._scan(1):
            return None
        if not self._scan(0):
            return None
        rest, self.text = self.text[self._read :], self.text[: self._read]
        self._complete()
        return rest

    def arguments(self) -> str:
        """Return the text of the arguments that was not returned before. Call this only if `begun` is set."""
        if self._whole is not None and not self._told:
            self._told = 1
            return self._whole.arguments
        if self._arguments is None or self._whole is not None:
            return ""
        start, end = self._arguments
        news = self.text[max(start, self._told) : end]
        self._told = len(self.text) if end is None else end
        return news

    def may_be_call(self) -> bool:
        """Return whether the text read so far can be the start of a call of one of the tools."""
        found = _BEGINNING.match(self.text)
        if found is None:
            return False
        key, has_key, name, has_name = found.groups()
        goes_on = found.end() == len(self.text)
        if not has_key:
            return goes_on and any(one.startswith(key or "") for one in ("name", *_ARGUMENT_KEYS))
        if key != "name":
            return key in _ARGUMENT_KEYS
        return name in self._names if has_name else goes_on and any(one.startswith(name or "") for one in self._names)

    def _find_head(self) -> None:
        head = _HEAD.match(self.text[:_MAX_HEAD_LEN])
        if head is None or head[1] not in self._names:
            return
        self._read = head.end()
        self._scanner = BracketScanner(depth=1)
        self._arguments = (head.end(), None)
        if self._enforced:
            self.begun = head[1]

    def _scan(self, depth: int) -> bool:
        """Read to the bracket that reduces the depth to `depth`. Returns whether it was found."""
        end = self._scanner.find_depth(self.text, self._read, depth)
        self._read = len(self.text) if end is None else end
        if end is not None and depth == 1 and self._arguments is not None:
            self._arguments = (self._arguments[0], end)
        return end is not None

    def _complete(self) -> None:
        if self.begun is not None:
            return
        call = _call(self.text, self._names)
        if call is not None and self._arguments is not None:  # the arguments as the model wrote them
            start, end = self._arguments
            call = ToolCall(call.name, self.text[start:end])
        self._whole = call
        self.begun = None if self._whole is None else self._whole.name


def _call(text: str, names: Collection[str]) -> ToolCall | None:
    """Return the call of a complete JSON object, or None if the object is not a call of a tool."""
    values = load_object(text)
    name = None if values is None else values.get("name")
    if values is None or not isinstance(name, str) or name not in names:
        return None
    arguments: Any = next((values[key] for key in _ARGUMENT_KEYS if values.get(key) is not None), {})
    if isinstance(arguments, str):
        arguments = load_object(arguments)
    return ToolCall(name, dump(arguments)) if isinstance(arguments, dict) else None
