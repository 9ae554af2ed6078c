"""Random walks over a matcher's masks, which find where its methods disagree."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from random import Random
from typing import Final

import numpy as np
import tokenizers
from numpy.typing import NDArray

from graftlm.contracts import GrammarMatcher

__all__ = ["Walk", "Walker"]

_REPLACEMENT: Final = "\ufffd"
_NUM_TRIED: Final = 6
_FORCED_SHARE: Final = 0.1  # of the steps, at which forced tokens are asked for
_END_SHARE: Final = 0.15  # of the steps at which the output may end, at which it does
_LONG_CHARS: Final = 6
#: What ends or divides a text in most formats; later steps take such tokens, so that walks come to an end.
_CLOSING: Final = frozenset('"}])>/\\,:tfn0123456789')


@dataclass(slots=True)
class Walk:
    """One walk.

    Attributes:
        text: what the tokens say.
        is_finished: whether it ended with a stop token.
        complaints: where answers disagree, in words.
    """

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    is_finished: bool = False
    complaints: list[str] = field(default_factory=list)


class Walker:
    """Walks over masks of one vocabulary.

    Args:
        tokenizer: whose tokens they are.
        vocab_size: V, columns of the masks.
        stop_token_ids: end an output.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer, vocab_size: int, stop_token_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._stop_token_ids = frozenset(stop_token_ids)

    @cached_property
    def _texts(self) -> list[str]:
        return [self._tokenizer.id_to_token(i) or "" for i in range(self._vocab_size)]

    @cached_property
    def _order(self) -> NDArray[np.intp]:
        """Tokens by their text: those beside each other begin alike."""
        return np.array(sorted(range(self._vocab_size), key=self._texts.__getitem__))

    @cached_property
    def _place(self) -> NDArray[np.intp]:
        return np.argsort(self._order)

    @cached_property
    def _is_long(self) -> NDArray[np.bool_]:
        return np.array([len(text) >= _LONG_CHARS for text in self._texts])

    @cached_property
    def _is_closing(self) -> NDArray[np.bool_]:
        return np.array([0 < len(text) <= 3 and text[0] in _CLOSING for text in self._texts])

    @cached_property
    def _special(self) -> frozenset[int]:
        added = self._tokenizer.get_added_tokens_decoder()
        return frozenset(token_id for token_id, token in added.items() if token.special)

    def walk(self, matcher: GrammarMatcher, random: Random, max_tokens: int) -> Walk:
        """Take allowed tokens at random until one ends the output, or for so many; ask everything on the way.

        Effects: the matcher has accepted the tokens.
        """
        walk = Walk()
        prefers_long = random.random() < 0.5
        while len(walk.token_ids) < max_tokens and not matcher.finished and len(walk.complaints) < 3:
            bits, allowed = self._mask(matcher, walk)
            if not len(allowed):
                walk.complaints.append("nothing is allowed, and the matcher is not finished")
                break
            self._try_tokens(matcher, bits, allowed, random, walk)
            if len(allowed) == 1 or random.random() < _FORCED_SHARE:
                self._try_forced(matcher, allowed, walk)
            token_id = self._choose(allowed, random, prefers_long, len(walk.token_ids) / max_tokens)
            if not matcher.accept(token_id):
                walk.complaints.append(f"token {token_id}, {self._texts[token_id]!r}, is allowed and rejected")
                break
            walk.token_ids.append(token_id)
        walk.is_finished = matcher.finished
        text_ids = walk.token_ids[:-1] if walk.is_finished else walk.token_ids
        walk.text = self._tokenizer.decode(text_ids, skip_special_tokens=False)
        if walk.is_finished and len(self._mask(matcher, walk)[1]):
            walk.complaints.append("a finished matcher allows tokens")
        return walk

    def _mask(self, matcher: GrammarMatcher, walk: Walk) -> tuple[NDArray[np.uint8], NDArray[np.intp]]:
        """Return the bits of a matcher's mask, uint8 [V], and the tokens that it allows."""
        mask = np.full((1, -(-self._vocab_size // 32)), 0x55555555, dtype=np.int32)
        matcher.fill_bitmask(mask, 0)
        bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
        if bits[self._vocab_size :].any():
            walk.complaints.append("bits past the vocabulary are set")
        bits = bits[: self._vocab_size]
        return bits, np.flatnonzero(bits)

    def _try_tokens(
        self,
        matcher: GrammarMatcher,
        bits: NDArray[np.uint8],
        allowed: NDArray[np.intp],
        random: Random,
        walk: Walk,
    ) -> None:
        """Compare the mask with `accept`, for tokens drawn from both sides and for some that begin as allowed ones."""
        tried = [int(allowed[random.randrange(len(allowed))]) for _ in range(_NUM_TRIED)]
        near = [int(self._place[token_id]) + random.choice((-2, -1, 1, 2)) for token_id in tried]
        tried += [int(self._order[place]) for place in near if 0 <= place < self._vocab_size]
        tried += [random.randrange(self._vocab_size) for _ in range(_NUM_TRIED)]
        for token_id in tried:
            if token_id in self._special and token_id not in self._stop_token_ids and not bits[token_id]:
                continue  # the library of a backend may print a warning for each
            accepted = matcher.accept(token_id)
            if accepted:
                matcher.rollback(1)
            if accepted != bool(bits[token_id]):
                said = "allowed and rejected" if bits[token_id] else "accepted and not allowed"
                walk.complaints.append(f"token {token_id}, {self._texts[token_id]!r}, is {said}")
                return
        if random.random() < _FORCED_SHARE and not np.array_equal(self._mask(matcher, walk)[0], bits):
            walk.complaints.append("the mask changes after tokens are accepted and rolled back")

    def _try_forced(self, matcher: GrammarMatcher, allowed: NDArray[np.intp], walk: Walk) -> None:
        """Compare forced tokens and text with the masks."""
        forced_text, forced = matcher.forced_text(), list(matcher.forced_tokens())
        num = 0
        for token_id in forced:
            if self._mask(matcher, walk)[1].tolist() != [token_id]:
                walk.complaints.append(f"token {token_id} is forced, and not the only one allowed")
                break
            if not matcher.accept(token_id):
                walk.complaints.append(f"token {token_id} is forced and rejected")
                break
            num += 1
        if num:
            matcher.rollback(num)
        if not forced_text:
            return
        if not self._stop_token_ids.isdisjoint(allowed.tolist()):
            walk.complaints.append(f"the output may end, and {forced_text!r} is forced")
        before = self._tokenizer.decode(walk.token_ids, skip_special_tokens=False)
        if before.endswith(_REPLACEMENT):
            return
        for token_id in allowed[:: max(1, len(allowed) // 16)].tolist():
            text = self._tokenizer.decode([*walk.token_ids, token_id], skip_special_tokens=False)[len(before) :]
            text = text.rstrip(_REPLACEMENT)
            if not forced_text.startswith(text) and not text.startswith(forced_text):
                walk.complaints.append(f"{forced_text!r} is forced, and {text!r} is allowed")

    def _choose(self, allowed: NDArray[np.intp], random: Random, prefers_long: bool, progress: float) -> int:
        """Return the token to go on with.

        Args:
            progress: the share of the tokens that the walk has taken.
        """
        ends = [token_id for token_id in self._stop_token_ids if token_id in allowed]
        if ends and (random.random() < _END_SHARE or progress > 0.6):
            return random.choice(ends)
        preferred = allowed
        if progress > 0.5 and random.random() < 0.7:
            preferred = allowed[self._is_closing[allowed]]
        elif prefers_long and random.random() < 0.7:
            preferred = allowed[self._is_long[allowed]]
        pool = preferred if len(preferred) else allowed
        return int(pool[random.randrange(len(pool))])
