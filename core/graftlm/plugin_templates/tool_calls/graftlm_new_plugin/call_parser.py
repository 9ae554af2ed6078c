"""The parser, which divides a text into calls between tags and the content around the calls."""

import json
import re
from collections.abc import Sequence
from typing import Final, NoReturn, TypeAlias

from graftlm.contracts import ContentDelta, MessageDelta, ToolCallDelta, ToolCallParser

__all__ = ["TaggedCallParser"]

_CALL_HEAD: Final = re.compile(r'\{"name": "([^"\\]+)", "arguments": ')

#: (index of the end, call), or (index of the end of the tag, None) if no call follows a tag.
_Reading: TypeAlias = tuple[int, ToolCallDelta | None]


class TaggedCallParser(ToolCallParser):
    """A parser that delays a call until it is complete, and white space until other content follows.

    Args:
        names: names of the tools; a call with another name is content.
        begin, end: tags around a call.
        enforced: whether a grammar enforces the format; then text that begins like a call is always a call.
    """

    def __init__(self, names: Sequence[str], begin: str, end: str, *, enforced: bool) -> None:
        self._names = frozenset(names)
        self._begin = begin
        self._end = end
        self._enforced = enforced
        self._decoder = json.JSONDecoder(parse_constant=_refuse)
        self._held = ""
        self._num_calls = 0
        self._is_after_call = False

    def push(self, text: str) -> Sequence[MessageDelta]:
        """Parse more text; return the deltas that no later text can change."""
        self._held += text
        return self._scan()

    def finish(self) -> Sequence[MessageDelta]:
        """Parse the end of the text. Delayed text becomes content, or an incomplete call if calls are enforced."""
        deltas: list[MessageDelta] = []
        while (found := self._held.find(self._begin)) >= 0:
            if self._enforced and (partial := self._partial_call(found)) is not None:
                return [*deltas, partial]
            deltas += self._take_content(found + len(self._begin))
            deltas += self._scan()
        return [*deltas, *self._take_content(len(self._held))]

    def cut_off(self) -> Sequence[MessageDelta]:
        """Parse the end of a truncated text; text that may be the beginning of a call is dropped."""
        found = self._held.find(self._begin)
        return self._take_content(len(self._held) - self._overlap()) if found < 0 else []

    def _scan(self) -> list[MessageDelta]:
        """Remove the part of the delayed text that no later text can change, and return it as deltas."""
        deltas: list[MessageDelta] = []
        while True:
            found = self._held.find(self._begin)
            end = found if found >= 0 else len(self._held) - self._overlap()
            deltas += self._take_content(len(self._held[:end].rstrip()))
            found = self._held.find(self._begin)
            reading = None if found < 0 else self._read_call(found + len(self._begin))
            if reading is None:
                return deltas
            end, call = reading
            if call is None:
                deltas += self._take_content(end)
            else:
                deltas.append(call)
                self._held = self._held[end:]
                self._num_calls += 1
                self._is_after_call = True

    def _read_call(self, start: int) -> _Reading | None:
        """Read the text after a tag that ends at `start`. Return None if more text is needed."""
        if self._held[start : start + 1] not in ("", "{"):
            return start, None
        try:
            value, end = self._decoder.raw_decode(self._held, start)
        except (ValueError, RecursionError):  # the object is incomplete or malformed
            return None
        tag = self._held[end : end + len(self._end)]
        if tag != self._end:
            return None if self._end.startswith(tag) else (start, None)
        call = self._call_of(value)
        return (start, None) if call is None else (end + len(tag), call)

    def _call_of(self, value: dict[str, object]) -> ToolCallDelta | None:
        name, arguments = value.get("name"), value.get("arguments")
        if value.keys() != {"name", "arguments"} or name not in self._names or not isinstance(arguments, dict):
            return None
        try:
            text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        except ValueError:  # a number is infinite, such as 1e999
            return None
        return ToolCallDelta(self._num_calls, str(name), text)

    def _partial_call(self, found: int) -> ToolCallDelta | None:
        """Return the incomplete call that starts at `found`, or None if there is no call."""
        head = _CALL_HEAD.match(self._held, found + len(self._begin))
        if head is None or head[1] not in self._names:
            return None
        try:
            _, end = self._decoder.raw_decode(self._held, head.end())
        except (ValueError, RecursionError):
            end = len(self._held)
        arguments, self._held = self._held[head.end() : end], ""
        return ToolCallDelta(self._num_calls, head[1], arguments)

    def _take_content(self, length: int) -> list[MessageDelta]:
        text, self._held = self._held[:length], self._held[length:]
        if self._is_after_call:
            text = text.lstrip()
            self._is_after_call = not text
        return [ContentDelta(text)] if text else []

    def _overlap(self) -> int:
        """Return the number of characters at the end that may be the beginning of a tag."""
        return next(size for size in reversed(range(len(self._begin))) if self._held.endswith(self._begin[:size]))


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")
