"""Makes random walks over a matcher's masks, to find contradictions between its methods."""

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
_FORCED_SHARE: Final = 0.1  # probability that a step checks the forced tokens
_END_SHARE: Final = 0.15  # probability of ending the output at a step where it may end
_LONG_CHARS: Final = 6
#: Characters that end or divide a text in most formats. Late steps of a walk prefer tokens that start with these
#: characters, so that the walk ends.
_CLOSING: Final = frozenset('"}])>/\\,:tfn0123456789')


@dataclass(slots=True)
class Walk:
    """The result of one walk.

    Attributes:
        token_ids: tokens that the matcher accepted.
        text: text of the tokens.
        is_finished: whether the walk ended with a stop token.
        complaints: descriptions of the found contradictions.
    """

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    is_finished: bool = False
    complaints: list[str] = field(default_factory=list)


class Walker:
    """A maker of random walks for one vocabulary.

    Args:
        tokenizer: tokenizer of the vocabulary.
        vocab_size: V, the number of bits in a mask.
        stop_token_ids: tokens that end an output.
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
        """Token ids sorted by text, [V]; neighbours often have a common prefix."""
        return np.array(sorted(range(self._vocab_size), key=self._texts.__getitem__))

    @cached_property
    def _rank(self) -> NDArray[np.intp]:
        """Index of each token in `_order`, [V]."""
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
        """Accept random allowed tokens until the output ends or has `max_tokens` tokens, and check every method.

        Effects: the matcher accepts the tokens of the walk, so its state changes.
        """
        walk = Walk()
        prefers_long = random.random() < 0.5
        while len(walk.token_ids) < max_tokens and not matcher.finished and len(walk.complaints) < 3:
            bits, allowed = self._mask(matcher, walk)
            if not len(allowed):
                walk.complaints.append("no token is allowed, but the matcher is not finished")
                break
            self._try_tokens(matcher, bits, allowed, random, walk)
            if len(allowed) == 1 or random.random() < _FORCED_SHARE:
                self._try_forced(matcher, allowed, walk)
            token_id = self._choose(allowed, random, prefers_long, len(walk.token_ids) / max_tokens)
            if not matcher.accept(token_id):
                walk.complaints.append(f"token {token_id}, {self._texts[token_id]!r}, is allowed but rejected")
                break
            walk.token_ids.append(token_id)
        walk.is_finished = matcher.finished
        text_ids = walk.token_ids[:-1] if walk.is_finished else walk.token_ids
        walk.text = self._tokenizer.decode(text_ids, skip_special_tokens=False)
        if walk.is_finished and len(self._mask(matcher, walk)[1]):
            walk.complaints.append("a finished matcher allows tokens")
        return walk

    def _mask(self, matcher: GrammarMatcher, walk: Walk) -> tuple[NDArray[np.uint8], NDArray[np.intp]]:
        """Return the bits of a matcher's mask, uint8 [V], and the ids of the allowed tokens."""
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
        """Compare the mask with `accept` for allowed tokens, for tokens with a similar text, and for random tokens."""
        tried = [int(allowed[random.randrange(len(allowed))]) for _ in range(_NUM_TRIED)]
        near = [int(self._rank[token_id]) + random.choice((-2, -1, 1, 2)) for token_id in tried]
        tried += [int(self._order[rank]) for rank in near if 0 <= rank < self._vocab_size]
        tried += [random.randrange(self._vocab_size) for _ in range(_NUM_TRIED)]
        for token_id in tried:
            if token_id in self._special and token_id not in self._stop_token_ids and not bits[token_id]:
                continue  # a library might print a warning for each such token
            accepted = matcher.accept(token_id)
            if accepted:
                matcher.rollback(1)
            if accepted != bool(bits[token_id]):
                difference = "allowed but rejected" if bits[token_id] else "accepted but not allowed"
                walk.complaints.append(f"token {token_id}, {self._texts[token_id]!r}, is {difference}")
                return
        if random.random() < _FORCED_SHARE and not np.array_equal(self._mask(matcher, walk)[0], bits):
            walk.complaints.append("the mask changes after tokens are accepted and rolled back")

    def _try_forced(self, matcher: GrammarMatcher, allowed: NDArray[np.intp], walk: Walk) -> None:
        """Compare the forced tokens and the forced text with the masks."""
        forced_text, forced = matcher.forced_text(), list(matcher.forced_tokens())
        num = 0
        for token_id in forced:
            if self._mask(matcher, walk)[1].tolist() != [token_id]:
                walk.complaints.append(f"token {token_id} is forced, but is not the only allowed token")
                break
            if not matcher.accept(token_id):
                walk.complaints.append(f"token {token_id} is forced but rejected")
                break
            num += 1
        if num:
            matcher.rollback(num)
        if not forced_text:
            return
        if not self._stop_token_ids.isdisjoint(allowed.tolist()):
            walk.complaints.append(f"the output may end, but {forced_text!r} is forced")
        before = self._tokenizer.decode(walk.token_ids, skip_special_tokens=False)
        if before.endswith(_REPLACEMENT):
            return
        for token_id in allowed[:: max(1, len(allowed) // 16)].tolist():
            text = self._tokenizer.decode([*walk.token_ids, token_id], skip_special_tokens=False)[len(before) :]
            text = text.rstrip(_REPLACEMENT)
            if not forced_text.startswith(text) and not text.startswith(forced_text):
                walk.complaints.append(f"{forced_text!r} is forced, but {text!r} is allowed")

    def _choose(self, allowed: NDArray[np.intp], random: Random, prefers_long: bool, progress: float) -> int:
        """Return the next token of a walk.

        Args:
            allowed: ids of the allowed tokens.
            random: random numbers of the walk.
            prefers_long: whether to prefer tokens with long texts in the first half of the walk.
            progress: number of tokens so far / `max_tokens`.
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
