"""Wraps chat formats of plugins, so that an exception fails the request with an error that names the plugin."""

from collections.abc import Callable, Sequence
from typing import TypeVar

from graftlm.contracts import (
    CallGrammar,
    ContentDelta,
    MessageDelta,
    ReasoningDelta,
    ReasoningFormat,
    ReasoningParser,
    Tool,
    ToolCall,
    ToolCallFormat,
    ToolCallParser,
    ToolChoice,
)
from graftlm.errors import GraftlmError, RequestFailedError

__all__ = ["GuardedReasoningFormat", "GuardedToolCallFormat"]

T = TypeVar("T")


class _Guard:
    """Calls a plugin's code.

    Args:
        who: name of the plugin in errors.
    """

    def __init__(self, who: str) -> None:
        self._who = who

    def __call__(self, method: str, call: Callable[[], T]) -> T:
        """Return the result of a call.

        Raises:
            RequestFailedError: the call raised an exception that is not a GraftlmError.
        """
        try:
            return call()
        except GraftlmError:
            raise
        except Exception as error:
            raise RequestFailedError(f"{self._who} failed in {method}: {type(error).__name__}: {error}") from error


class _GuardedToolCallParser(ToolCallParser):
    def __init__(self, inner: ToolCallParser, guard: _Guard) -> None:
        self._inner = inner
        self._guard = guard

    def push(self, text: str) -> Sequence[MessageDelta]:
        return self._guard("parser.push", lambda: self._inner.push(text))

    def finish(self) -> Sequence[MessageDelta]:
        return self._guard("parser.finish", self._inner.finish)

    def cut_off(self) -> Sequence[MessageDelta]:
        return self._guard("parser.cut_off", self._inner.cut_off)


class GuardedToolCallFormat(ToolCallFormat):
    """A tool call format that calls the methods of `inner`.

    Args:
        who: name of the plugin in errors.
    """

    def __init__(self, inner: ToolCallFormat, who: str) -> None:
        self.inner = inner
        self._guard = _Guard(who)

    def parser(self, tools: Sequence[Tool], *, enforced: bool) -> ToolCallParser:
        """Return a parser for one completion."""
        parser = self._guard("parser", lambda: self.inner.parser(tools, enforced=enforced))
        return _GuardedToolCallParser(parser, self._guard)

    def grammar(self, tools: Sequence[Tool], choice: ToolChoice, *, parallel: bool) -> CallGrammar | None:
        """Return the grammar that enforces the format."""
        return self._guard("grammar", lambda: self.inner.grammar(tools, choice, parallel=parallel))

    def render(self, calls: Sequence[ToolCall]) -> str:
        """Return the text that the model would generate for these calls."""
        return self._guard("render", lambda: self.inner.render(calls))

    def instructions(self, tools: Sequence[Tool]) -> str:
        """Return a prompt that describes the tools and this format."""
        return self._guard("instructions", lambda: self.inner.instructions(tools))

    def new_id(self) -> str:
        """Return a new random id for a call."""
        return self._guard("new_id", self.inner.new_id)


class _GuardedReasoningParser(ReasoningParser):
    def __init__(self, inner: ReasoningParser, guard: _Guard) -> None:
        self._inner = inner
        self._guard = guard

    def push(self, text: str) -> Sequence[ReasoningDelta | ContentDelta]:
        return self._guard("parser.push", lambda: self._inner.push(text))

    def finish(self) -> Sequence[ReasoningDelta | ContentDelta]:
        return self._guard("parser.finish", self._inner.finish)


class GuardedReasoningFormat(ReasoningFormat):
    """A reasoning format that calls the methods of `inner`.

    Args:
        who: name of the plugin in errors.
    """

    def __init__(self, inner: ReasoningFormat, who: str) -> None:
        self.end = inner.end
        self.begin = inner.begin
        self.inner = inner
        self._guard = _Guard(who)

    def is_open(self, prompt_end: str) -> bool:
        """Return whether a prompt leaves the reasoning open."""
        return self._guard("is_open", lambda: self.inner.is_open(prompt_end))

    def parser(self, *, is_open: bool) -> ReasoningParser:
        """Return a parser for one completion."""
        parser = self._guard("parser", lambda: self.inner.parser(is_open=is_open))
        return _GuardedReasoningParser(parser, self._guard)
