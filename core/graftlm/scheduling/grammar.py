"""One request's grammar: on its way while it is compiled, then the tokens that may come next."""

from collections.abc import Callable
from concurrent.futures import Future

import numpy as np
from numpy.typing import NDArray

from graftlm.contracts import CompiledGrammar, GrammarMatcher
from graftlm.errors import InvariantError, RequestError, RequestFailedError

__all__ = ["RequestGrammar"]


class RequestGrammar:
    """Follows one completion through a grammar that several requests may share.

    It stays with its request when that is retracted: it has accepted the committed output, wherever the request runs.

    Attributes:
        deadline_s: clock reading at which a request whose grammar is not compiled yet is given up.
        bits: int32 [ceil(V / 32)], the tokens allowed next, as in `TokenMask`; zeros before it has started.
    """

    def __init__(self, compiling: "Future[CompiledGrammar]", deadline_s: float, vocab_size: int) -> None:
        self.deadline_s = deadline_s
        self._compiling = compiling
        self._matcher: GrammarMatcher | None = None
        self._mask: NDArray[np.int32] = np.zeros((1, -(-vocab_size // 32)), dtype=np.int32)
        self.bits: NDArray[np.int32] = self._mask[0]

    @property
    def is_ready(self) -> bool:
        """Whether it has started."""
        return self._matcher is not None

    def when_compiled(self, callback: Callable[[], None]) -> None:
        """Call back, from any thread, when `start` has something to say; at once if it already has."""
        self._compiling.add_done_callback(lambda _: callback())

    def start(self, now: float) -> bool:
        """Take up the compiled grammar; False while it is compiled.

        Raises:
            RequestError: compiling failed or took too long, or no token begins the grammar.
        """
        if not self._compiling.done():
            if now >= self.deadline_s:
                raise RequestFailedError(
                    "its grammar was not compiled in time. Simplify it, or raise grammar.timeout_s."
                )
            return False
        try:
            self._matcher = self._compiling.result().matcher()
            self._fill(self._matcher)
        except RequestError:
            raise
        except Exception as error:  # a plugin's code: whatever it raises fails this request only
            raise _failed(error) from error
        return True

    def accept(self, token_id: int) -> bool:
        """Move over a sampled token, and find the tokens that may come next.

        Returns: whether the token ended the grammar.

        Raises:
            RequestFailedError: nothing may come next, or the backend contradicts itself.
        """
        matcher = self._matcher
        if matcher is None:
            raise InvariantError(f"token {token_id} was sampled before the grammar was compiled")
        try:
            if not matcher.accept(token_id):
                raise RequestFailedError(f"the grammar backend rejects token {token_id}, which its mask had allowed")
            if matcher.finished:
                return True
            self._fill(matcher)
        except RequestError:
            raise
        except Exception as error:  # a plugin's code: whatever it raises fails this request only
            raise _failed(error) from error
        return False

    def _fill(self, matcher: GrammarMatcher) -> None:
        matcher.fill_bitmask(self._mask, 0)
        if not self.bits.any():
            raise RequestFailedError(
                "no token may come next: the grammar cannot be completed, or the vocabulary cannot spell what it wants"
            )


def _failed(error: Exception) -> RequestFailedError:
    return RequestFailedError(f"the grammar backend failed: {type(error).__name__}: {error}")
