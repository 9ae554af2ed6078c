"""What a call says of a request besides its prompt and its sampling parameters."""

import math
from dataclasses import dataclass, replace
from typing import Final, Self

from graftlm.errors import RequestError
from graftlm.pooling.pooling import Pooling

__all__ = ["DEFAULT_OPTIONS", "RequestOptions"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOptions:
    """How one request is scheduled, which cached prefixes it may use, and what it computes.

    The engine and the server make one per request. `Intake.request` turns it into the scheduler's terms: a deadline, a
    cache namespace, a loaded adapter.

    Attributes:
        priority: requests of higher priority are admitted first and retracted last.
        timeout_s: seconds from arrival until the request ends as aborted; None: no limit.
        cache_salt: a request shares cached prefixes only with requests of the same salt and the same adapter.
        adapter: the name of a loaded low-rank adapter; None: the model alone.
        pooling: computes one vector of the prompt instead of generating tokens; None: generates tokens.

    Raises:
        RequestError: a value is of the wrong type or out of range.
    """

    priority: int = 0
    timeout_s: float | None = None
    cache_salt: str = ""
    adapter: str | None = None
    pooling: Pooling | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.priority, int) or isinstance(self.priority, bool):
            raise RequestError(f"priority must be an integer, got {self.priority!r}")
        _check_timeout(self.timeout_s)
        _check_salt(self.cache_salt)

    def limited_to(self, timeout_s: float | None) -> Self:
        """Return the options with the shorter of their own timeout and another; None is no limit."""
        timeouts = [seconds for seconds in (self.timeout_s, timeout_s) if seconds is not None]
        return replace(self, timeout_s=min(timeouts, default=None))


def _check_timeout(timeout_s: object) -> None:
    if timeout_s is None:
        return
    is_number = isinstance(timeout_s, int | float) and not isinstance(timeout_s, bool)
    # By its text: a float cannot hold an int of more than 308 digits.
    if not is_number or not 0 < float(str(timeout_s)) < math.inf:
        raise RequestError(f"timeout_s must be a number of seconds above 0, or None, got {timeout_s!r}")


def _check_salt(cache_salt: object) -> None:
    if not isinstance(cache_salt, str):
        raise RequestError(f"cache_salt must be a string, one for all prompts of the call, got {cache_salt!r}")
    try:
        cache_salt.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"cache_salt must be valid Unicode, got a lone surrogate: {cache_salt!a:.60}") from error


#: Options of a request that sets none.
DEFAULT_OPTIONS: Final = RequestOptions()
