"""Counts the calls and tokens of an endpoint that charges by the token, and the savings by speculation."""

from dataclasses import dataclass, fields, replace
from typing import Self

__all__ = ["ApiUsage", "TokenUsage", "UsageMeter"]


@dataclass(frozen=True, slots=True)
class ApiUsage:
    """Numbers of calls and tokens since a start; the difference of two objects is the usage between two times.

    Attributes:
        calls: number of answered calls.
        prompt_tokens: prompt tokens of all calls, as counted by the endpoint.
        completion_tokens: generated tokens, as counted by the endpoint; this includes tokens that no `gen` used.
        saved_calls: number of `gen`s that were answered from the completion of an earlier call.
        saved_prompt_tokens: estimated number of prompt tokens that separate calls for these `gen`s would have had.
    """

    calls: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    saved_calls: int = 0
    saved_prompt_tokens: int = 0

    def __sub__(self, before: Self) -> Self:
        return type(self)(*[getattr(self, field.name) - getattr(before, field.name) for field in fields(self)])


class UsageMeter:
    """Adds up usage. The language's event loop writes it; any thread may read it."""

    def __init__(self) -> None:
        self._usage = ApiUsage()

    @property
    def usage(self) -> ApiUsage:
        """The usage so far."""
        return self._usage

    def count_call(self, prompt_tokens: int, completion_tokens: int) -> None:
        """Count an answered call."""
        now = self._usage
        self._usage = replace(
            now,
            calls=now.calls + 1,
            prompt_tokens=now.prompt_tokens + prompt_tokens,
            completion_tokens=now.completion_tokens + completion_tokens,
        )

    def count_saved(self, prompt_tokens: int) -> None:
        """Count a call that was not needed, with the tokens of its prompt."""
        now = self._usage
        self._usage = replace(
            now,
            saved_calls=now.saved_calls + 1,
            saved_prompt_tokens=now.saved_prompt_tokens + prompt_tokens,
        )


class TokenUsage:
    """Tokens since the last `reset`, under SGLang's names."""

    def __init__(self, meter: UsageMeter) -> None:
        self._meter = meter
        self._start = ApiUsage()

    @property
    def prompt_tokens(self) -> int:
        """Prompt tokens of all calls."""
        return (self._meter.usage - self._start).prompt_tokens

    @property
    def completion_tokens(self) -> int:
        """Generated tokens of all calls."""
        return (self._meter.usage - self._start).completion_tokens

    def reset(self) -> None:
        """Set `prompt_tokens` and `completion_tokens` to 0."""
        self._start = self._meter.usage
