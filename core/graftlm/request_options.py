"""The options of a request besides its prompt and its sampling parameters."""

import math
from dataclasses import dataclass, replace
from typing import Final, Self

from graftlm.errors import RequestError
from graftlm.pooling.pooling import Pooling

__all__ = ["DEFAULT_OPTIONS", "RequestOptions"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOptions:
    """The options that determine how one request is scheduled, which cached prefixes it may use, and what it computes.

    The engine and the server create one object per request. `Intake.request` derives the scheduler's data from it: a
    deadline, a cache namespace, a loaded adapter.

    Attributes:
        priority: number; requests of higher priority are admitted first and retracted last.
        timeout_s: seconds from arrival until the request ends as aborted; None: no limit.
        cache_salt: text; requests share cached prefixes only if they have the same salt and the same adapter.
        adapter: name of a loaded LoRA adapter; None: no adapter.
        pooling: how the prompt's vector is computed; None: the request generates tokens instead of a vector.
        routing_key: the client's name for requests that belong together, for routing policies; None without a name.

    Raises:
        RequestError: a value is of the wrong type or out of range.
    """

    priority: int = 0
    timeout_s: float | None = None
    cache_salt: str = ""
    adapter: str | None = None
    pooling: Pooling | None = None
    routing_key: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.priority, int) or isinstance(self.priority, bool):
            raise RequestError(f"priority must be an integer, got {self.priority!r}")
        _check_timeout(self.timeout_s)
        _check_salt(self.cache_salt)

    def limited_to(self, timeout_s: float | None) -> Self:
        """Return the options with their own timeout or `timeout_s`, whichever is shorter; None means no limit."""
        timeouts = [seconds for seconds in (self.timeout_s, timeout_s) if seconds is not None]
        return replace(self, timeout_s=min(timeouts, default=None))


def _check_timeout(timeout_s: object) -> None:
    if timeout_s is None:
        return
    is_number = isinstance(timeout_s, int | float) and not isinstance(timeout_s, bool)
    # Converted to text first, because `float` raises for an int of more than 308 digits.
    if not is_number or not 0 < float(str(timeout_s)) < math.inf:
        raise RequestError(f"timeout_s must be a number of seconds above 0, or None, got {timeout_s!r}")


def _check_salt(cache_salt: object) -> None:
    if not isinstance(cache_salt, str):
        raise RequestError(f"cache_salt must be a string, one for all prompts of the call, got {cache_salt!r}")
    try:
        cache_salt.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"cache_salt must be valid Unicode, got a lone surrogate: {cache_salt!a:.60}") from error


#: The options of a request that sets no option.
DEFAULT_OPTIONS: Final = RequestOptions()
