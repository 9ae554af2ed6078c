"""One request's grammar: first its compilation, then the state of the request's output in the grammar."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from graftlm.contracts import CompiledGrammar, GrammarMatcher
from graftlm.errors import InvariantError, RequestError, RequestFailedError

__all__ = ["FillBitmasks", "RequestGrammar"]

T = TypeVar("T")

#: The type of `GrammarBackend.fill_bitmasks`.
FillBitmasks = Callable[[Sequence[GrammarMatcher], NDArray[np.int32]], None]


class RequestGrammar:
    """Tracks the state of one completion in its grammar. Several requests may share the compiled grammar.

    The matcher has always accepted exactly the committed output, so it stays valid if the request is retracted.

    Args:
        deadline_s: function that returns the value of the property `deadline_s`; called at each access.
        leave: function that is called when the request ends before the grammar is compiled.
        start_matcher: function that creates the matcher from the compiled grammar.

    Attributes:
        num_words: ceil(V / 32), the length of the bitmasks.
        fill_bitmasks: function that fills the bitmasks of several requests in one call. Requests can share a call only
            if they have the same function.
    """

    def __init__(
        self,
        compiling: "Future[CompiledGrammar]",
        deadline_s: Callable[[], float],
        vocab_size: int,
        fill_bitmasks: FillBitmasks,
        leave: Callable[[], None] = lambda: None,
        start_matcher: Callable[[CompiledGrammar], GrammarMatcher] = lambda compiled: compiled.matcher(),
    ) -> None:
        self.leave = leave
        self._start_matcher = start_matcher
        self._deadline_s = deadline_s
        self.num_words = -(-vocab_size // 32)
        self.fill_bitmasks = fill_bitmasks
        self._compiling = compiling
        self._matcher: GrammarMatcher | None = None
        self._lost: str | None = None

    @property
    def deadline_s(self) -> float:
        """Clock reading at which the request fails if its grammar is not compiled yet; it may increase."""
        return self._deadline_s()

    @property
    def is_ready(self) -> bool:
        """Whether `start` has returned True."""
        return self._matcher is not None

    @property
    def matcher(self) -> GrammarMatcher:
        """The matcher, which has accepted the output so far.

        Raises:
            RequestFailedError: the matcher is unusable, because the backend failed to roll back.
        """
        if self._lost is not None:
            raise RequestFailedError(self._lost)
        if self._matcher is None:
            raise InvariantError("a request runs before its grammar was compiled")
        return self._matcher

    def when_compiled(self, callback: Callable[[], None]) -> None:
        """Call `callback`, from any thread, when compilation has ended; immediately if it already has."""
        self._compiling.add_done_callback(lambda _: callback())

    def start(self, now: float) -> bool:
        """Create the matcher if the grammar is compiled. Return False if it is still being compiled.

        Raises:
            RequestError: compiling failed or took too long.
        """
        if not self._compiling.done():
            if now >= self.deadline_s:
                raise RequestFailedError(
                    "its grammar was not compiled in time. Simplify it, or raise grammar.timeout_s."
                )
            return False
        self._matcher = _guarded(lambda: self._start_matcher(self._compiling.result()))
        return True

    def accept(self, token_id: int) -> bool:
        """Advance by a sampled token.

        Returns: whether the token ended the grammar.

        Raises:
            RequestFailedError: the backend rejects a token that its mask allowed, or fails.
        """
        matcher = self.matcher
        if not _guarded(lambda: bool(matcher.accept(token_id))):
            raise RequestFailedError(f"the grammar backend rejects token {token_id}, which its mask had allowed")
        return _guarded(lambda: bool(matcher.finished))

    def fill(self, bits: NDArray[np.int32]) -> None:
        """Write the mask of the allowed next tokens into `bits`, int32 [ceil(V / 32)].

        Raises:
            RequestFailedError: no token is allowed, or the backend fails.
        """
        _guarded(lambda: self.matcher.fill_bitmask(bits[None], 0))
        check_allowed(bits)

    def masks_along(self, token_ids: Sequence[int]) -> NDArray[np.int32]:
        """Return the bitmasks before the first token and after each token.

        The walk stops before the first token that is forbidden or ends the grammar.

        Effects: none; the matcher's state is restored, even if the backend failed. If it cannot be restored, every
            later use of the grammar raises RequestFailedError.

        Returns: int32 [n + 1, ceil(V / 32)], where n is the number of tokens before the stop.

        Raises:
            RequestFailedError: the backend failed.
        """
        matcher = self.matcher
        bits = np.zeros((len(token_ids) + 1, self.num_words), dtype=np.int32)
        num_accepted, is_filled = 0, False

        def walk() -> int:
            nonlocal num_accepted, is_filled
            matcher.fill_bitmask(bits, 0)
            is_filled = True
            for i, token_id in enumerate(token_ids):
                # A backend may log a warning for a token that `accept` rejects.
                if not bits[i, token_id >> 5] >> (token_id & 31) & 1 or not matcher.accept(token_id):
                    return i
                num_accepted += 1
                if matcher.finished:
                    return i
                matcher.fill_bitmask(bits, i + 1)
                if not bits[i + 1].any():
                    return i
            return len(token_ids)

        try:
            num_allowed = _guarded(walk)
        except RequestError:
            if is_filled:  # otherwise no token was accepted
                self._restore(num_accepted, bits[0])
            raise
        self._roll_back(num_accepted)
        return bits[: num_allowed + 1]

    def forced_text(self) -> str:
        """Return the text that the grammar forces next; "" if the next character is not forced.

        Raises:
            RequestFailedError: the backend fails.
        """
        return _guarded(lambda: _text(self.matcher.forced_text()))

    def replace(self, dropped: Sequence[int], token_ids: Sequence[int]) -> bool:
        """Roll back `dropped`, the latest accepted tokens, and accept `token_ids` instead.

        Returns: False, with the state unchanged, if the grammar does not allow `token_ids`.

        Raises:
            RequestFailedError: the backend rejects tokens that it accepted before, or fails.
        """
        matcher = self.matcher

        def move(old: Sequence[int], new: Sequence[int]) -> int:
            matcher.rollback(len(old))
            return next((i for i, token_id in enumerate(new) if not matcher.accept(token_id)), len(new))

        num_accepted = _guarded(lambda: move(dropped, token_ids))
        if num_accepted == len(token_ids):
            return True
        if _guarded(lambda: move(token_ids[:num_accepted], dropped)) < len(dropped):
            raise RequestFailedError("the grammar backend rejects tokens after a rollback that it had accepted before")
        return False

    def _restore(self, num_tokens: int, expected: NDArray[np.int32]) -> None:
        """Roll back after a failed call, which may have accepted one token more than `num_tokens`.

        Args:
            expected: the mask of the state to which the matcher returns.

        Raises:
            RequestFailedError: the state was lost.
        """
        self._roll_back(num_tokens)
        if self._allows(expected):
            return
        self._roll_back(1)
        if not self._allows(expected):
            self._lost = "the grammar's state was lost, because the backend failed while it accepted a token"
            raise RequestFailedError(self._lost)

    def _allows(self, expected: NDArray[np.int32]) -> bool:
        """Return whether the mask of the allowed next tokens is the expected one."""
        bits = np.zeros((1, self.num_words), dtype=np.int32)
        _guarded(lambda: self.matcher.fill_bitmask(bits, 0))
        return bool(np.array_equal(bits[0], expected))

    def _roll_back(self, num_tokens: int) -> None:
        try:
            _guarded(lambda: self.matcher.rollback(num_tokens))
        except RequestError as error:
            self._lost = f"the grammar's state was lost, because {num_tokens} tokens were not rolled back: {error}"
            raise RequestFailedError(self._lost) from error


def check_allowed(bits: NDArray[np.int32]) -> None:
    """Check that a mask allows at least one token.

    Raises:
        RequestFailedError: the mask allows no token.
    """
    if not bits.any():
        raise RequestFailedError(
            "no token is allowed next: the grammar cannot be completed, or no tokens of the vocabulary spell the "
            "required text"
        )


def _text(text: object) -> str:
    """Check that a plugin's result is text, and return it."""
    if not isinstance(text, str):
        raise TypeError(f"forced_text returned {type(text).__name__}, expected str")
    text.encode()  # raises for unpaired surrogates
    return text


def _guarded(call: Callable[[], T]) -> T:
    """Call a plugin's code, and convert any error to a request's failure. A panic in Rust is not an `Exception`."""
    try:
        return call()
    except (RequestError, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise RequestFailedError(f"the grammar backend failed: {type(error).__name__}: {error}") from error
