"""Finds the tokens that a grammar forces next, from the masks of a matcher."""

from typing import Final

import numpy as np

from graftlm.contracts import GrammarMatcher

__all__ = ["MAX_FORCED_TOKENS", "find_forced_tokens"]

MAX_FORCED_TOKENS: Final = 64


def find_forced_tokens(matcher: GrammarMatcher, vocab_size: int) -> list[int]:
    """Return the forced next tokens, at most `MAX_FORCED_TOKENS`. The matcher's state does not change."""
    mask = np.zeros((1, -(-vocab_size // 32)), dtype=np.int32)
    forced: list[int] = []
    while not matcher.finished and len(forced) < MAX_FORCED_TOKENS:
        matcher.fill_bitmask(mask, 0)
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        if len(allowed) != 1 or not matcher.accept(int(allowed[0])):
            break
        forced.append(int(allowed[0]))
    if forced:
        matcher.rollback(len(forced))
    return forced
