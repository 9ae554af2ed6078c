"""What an endpoint that bills by the token was asked, and what it did not have to be asked."""

from dataclasses import dataclass, fields, replace
from typing import Self

__all__ = ["ApiUsage", "UsageMeter"]


@dataclass(frozen=True, slots=True)
class ApiUsage:
    """Calls and tokens; `after - before` is what happened between.

    Attributes:
        calls: that were answered.
        prompt_tokens: that the endpoint counted, in all calls.
        completion_tokens: likewise, those that no `gen` had a use for included.
        saved_calls: `gen`s that were answered out of the completion of an earlier one.
        saved_prompt_tokens: that their prompts would have had, estimated from the calls' own counts.
    """

    calls: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    saved_calls: int = 0
    saved_prompt_tokens: int = 0

    def __sub__(self, before: Self) -> Self:
        return type(self)(*[getattr(self, field.name) - getattr(before, field.name) for field in fields(self)])


class UsageMeter:
    """Adds up. Written in the language's event loop, read anywhere."""

    def __init__(self) -> None:
        self._usage = ApiUsage()

    @property
    def usage(self) -> ApiUsage:
        """What there was so far."""
        return self._usage

    def count_call(self, prompt_tokens: int, completion_tokens: int) -> None:
        """Count a call that was answered."""
        now = self._usage
        self._usage = replace(
            now,
            calls=now.calls + 1,
            prompt_tokens=now.prompt_tokens + prompt_tokens,
            completion_tokens=now.completion_tokens + completion_tokens,
        )

    def count_saved(self, prompt_tokens: int) -> None:
        """Count a call that was not needed, and the tokens that its prompt would have had."""
        now = self._usage
        self._usage = replace(
            now,
            saved_calls=now.saved_calls + 1,
            saved_prompt_tokens=now.saved_prompt_tokens + prompt_tokens,
        )
