"""Checks that a new matcher accepts the tokens that its masks allow."""

import time
from random import Random
from typing import Final

import numpy as np

from graftlm.contracts import GrammarKind, GrammarMatcher
from graftlm.errors import GrammarError

__all__ = ["check_masks", "unsound"]

_NUM_STATES: Final = 6
_NUM_TOKENS: Final = 48
_MAX_S: Final = 0.02


def check_masks(kind: GrammarKind, matcher: GrammarMatcher, vocab_size: int) -> None:
    """Refuse a grammar whose masks are wrong.

    The check makes 6 steps with random tokens, and in each step tries 48 tokens that the mask allows. The random
    numbers are the same for each compilation. The check ends early after 20 ms of this thread's CPU time.

    Effects: the matcher accepts tokens, so its state changes.

    Raises:
        GrammarError: the matcher rejects a token that its mask allows.
    """
    mask = np.zeros((1, -(-vocab_size // 32)), dtype=np.int32)
    random, start_s = Random(0), time.thread_time()
    for _ in range(_NUM_STATES):
        matcher.fill_bitmask(mask, 0)
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        if not len(allowed) or time.thread_time() - start_s > _MAX_S:
            return
        tried = [int(allowed[random.randrange(len(allowed))]) for _ in range(_NUM_TOKENS)]
        for token_id in tried[:-1]:
            if not matcher.accept(token_id):
                raise unsound(kind)
            matcher.rollback(1)
        if not matcher.accept(tried[-1]):
            raise unsound(kind)


def unsound(kind: GrammarKind) -> GrammarError:
    """Return the error for a grammar whose masks are wrong."""
    return GrammarError(
        f"{kind.value}: xgrammar allows tokens that it then rejects, which is an error of the library; use llguidance"
    )
