r"""Grammars that wait: what a model thinks before it answers is free, and the grammar holds what follows.

    <think> free text </think> \n\n {"answer": ...}
    begin                end   gap  what the grammar holds

Backends know nothing of it: their matchers begin where the gap ends.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from graftlm.contracts import CompiledGrammar, GrammarMatcher
from graftlm.errors import GrammarError
from graftlm.tokenization import Tokenizer

__all__ = ["DelayedGrammar", "Reasoning", "ReasoningTokens", "fill_bitmasks"]

#: Where a matcher is; from 0 on it is within the reasoning, and the number is how many bytes of its end are there.
_HELD, _GAP, _START = -1, -3, -4
_MAX_LINE_ENDS: Final = 2


@dataclass(frozen=True, slots=True)
class Reasoning:
    """What comes before the text that a grammar holds.

    Attributes:
        end: text that ends it. Up to two line ends may follow.
        begin: text, a single token, with which the output begins if there is any; None: the output begins within it.
    """

    end: str
    begin: str | None = None


class ReasoningTokens:
    """How the tokens of a vocabulary spell the end of a model's reasoning.

    Special tokens are never text, and stop tokens do not end the output within the reasoning: it has no answer yet.
    A token that goes on after the end is not allowed, unless it does so with line ends.

    Raises:
        GrammarError: the reasoning's end is a special token, or its beginning none that is text.

    Attributes:
        num_words: ceil(V / 32).
        begin_id: the token that `Reasoning.begin` is, None if that is None.
        within: bitmasks, int32 [len(end), ceil(V / 32)], of what may come once so many bytes of the end are there.
        gaps: bitmasks, int32 [3, ceil(V / 32)], of tokens that are up to so many line ends.
        begins_with_line_end: a bitmask, int32 [ceil(V / 32)].
    """

    def __init__(
        self, reasoning: Reasoning, tokenizer: Tokenizer, vocab_size: int, stop_token_ids: Sequence[int]
    ) -> None:
        self._end = reasoning.end.encode()
        self._back = _borders(self._end)
        self._tokenizer = tokenizer
        self._stops = frozenset(stop_token_ids)
        self.num_words = -(-vocab_size // 32)
        self.begin_id = None if reasoning.begin is None else tokenizer.token_of(reasoning.begin)
        texts = [self.text_of(token_id) for token_id in range(min(vocab_size, tokenizer.vocab_size))]
        if reasoning.begin is not None and (self.begin_id is None or self.begin_id >= len(texts)):
            raise GrammarError(f"reasoning_begin: {reasoning.begin!r} is no single token of this model's text")
        if self._end not in texts and self._is_special(self._end):
            raise GrammarError(f"reasoning_end: {reasoning.end!r} is a special token of this model, so never text")
        free = [i for i, text in enumerate(texts) if text]
        self.within = self._within(free, texts)
        line_ends = [[i for i in free if texts[i] in (b"\n", b"\n\n")[:most]] for most in range(_MAX_LINE_ENDS + 1)]
        self.gaps = np.stack([self._mask(ids) for ids in line_ends])
        self.begins_with_line_end = self._mask([i for i in free if texts[i].startswith(b"\n")])

    def text_of(self, token_id: int) -> bytes:
        """Return what a token adds to the text; b"" for special, stop and unknown ones."""
        if token_id in self._stops or self._tokenizer.is_special(token_id):
            return b""
        return self._tokenizer.token_bytes(token_id)

    def after(self, num_matched: int, text: bytes) -> int | None:
        """Return the place that a token leads to from within the reasoning; None if it is not allowed.

        Args:
            num_matched: bytes of the end that are there.
            text: the token's, at least a byte.
        """
        for i, byte in enumerate(text):
            while num_matched and self._end[num_matched] != byte:
                num_matched = self._back[num_matched]
            num_matched += self._end[num_matched] == byte
            if num_matched == len(self._end):
                return after_line_ends(_MAX_LINE_ENDS, text[i + 1 :])
        return num_matched

    def _within(self, free: list[int], texts: list[bytes]) -> NDArray[np.int32]:
        """Return the bitmasks of `within`: all text but tokens that lead past the end."""
        past = [i for i in free if self._end[-1:] in texts[i]]
        completing = [[i for i in past if texts[i].startswith(self._end[k:])] for k in range(len(self._end))]
        completing[0] = [i for i in past if self._end in texts[i]]
        masks = []
        for num_matched in range(len(self._end)):
            suspects, k = set(completing[0]), num_matched
            while k:
                suspects.update(completing[k])
                k = self._back[k]
            refused = {i for i in suspects if self.after(num_matched, texts[i]) is None}
            masks.append(self._mask([i for i in free if i not in refused] if refused else free))
        return np.stack(masks)

    def _mask(self, token_ids: Sequence[int]) -> NDArray[np.int32]:
        bits = np.zeros(32 * self.num_words, dtype=np.uint8)
        bits[list(token_ids)] = 1
        return np.packbits(bits, bitorder="little").view(np.int32)

    def _is_special(self, text: bytes) -> bool:
        ids = range(self._tokenizer.vocab_size)
        return any(self._tokenizer.is_special(i) and self._tokenizer.token_bytes(i) == text for i in ids)


def after_line_ends(num_left: int, text: bytes) -> int | None:
    """Return the place that text leads to where so many line ends may come; None if it is no such line ends."""
    if text.strip(b"\n") or len(text) > num_left:
        return None
    return _HELD if len(text) == num_left else _GAP + _MAX_LINE_ENDS - num_left + len(text)


def _borders(pattern: bytes) -> list[int]:
    """Return, for each k, how many bytes of a pattern still match where its first k do, but not the next (KMP)."""
    back = [0] * (len(pattern) + 1)
    for k in range(2, len(pattern) + 1):
        size = back[k - 1]
        while size and pattern[size] != pattern[k - 1]:
            size = back[size]
        back[k] = size + (pattern[size] == pattern[k - 1])
    return back


class DelayedGrammar(CompiledGrammar):
    """A compiled grammar that waits for the end of the reasoning."""

    def __init__(self, inner: CompiledGrammar, tokens: ReasoningTokens, *, is_open: bool) -> None:
        """Put reasoning before a grammar.

        Args:
            inner: the grammar.
            is_open: the output begins within the reasoning; otherwise with its beginning, or without any.
        """
        self._inner = inner
        self._tokens = tokens
        self._is_open = is_open

    def matcher(self) -> GrammarMatcher:
        """Return a fresh matcher at the start."""
        return DelayedMatcher(self._inner.matcher(), self._tokens, 0 if self._is_open else _START)


class DelayedMatcher(GrammarMatcher):
    """One request's place in the reasoning, and then in a grammar.

    Attributes:
        inner: its place in the grammar.
    """

    def __init__(self, inner: GrammarMatcher, tokens: ReasoningTokens, place: int) -> None:
        self.inner = inner
        self._tokens = tokens
        self._place = place
        #: Where it was before each token that the grammar has not seen, and before the first that it has.
        self._before: list[int] = []
        self._before_held = place
        self._num_held = 0

    @property
    def is_within(self) -> bool:
        """Whether it is within the reasoning, where the grammar has no say."""
        return self._place >= 0

    @property
    def finished(self) -> bool:
        """Whether the grammar has been completed and a stop token accepted."""
        return self._num_held > 0 and self.inner.finished

    def accept(self, token_id: int) -> bool:
        """Advance over a token; False leaves the matcher unchanged."""
        if self._place == _HELD:
            return self._accept_held(token_id)
        text = self._tokens.text_of(token_id)
        if self._place >= 0:
            return self._go(self._tokens.after(self._place, text) if text else None)
        if self._place == _START and token_id == self._tokens.begin_id:
            return self._go(0)
        if self._place != _START and text.startswith(b"\n"):
            return self._go(after_line_ends(_HELD - self._place, text))
        return self._accept_held(token_id)

    def rollback(self, num_tokens: int) -> None:
        """Undo the latest accepted tokens."""
        num_held = min(num_tokens, self._num_held)
        if num_held:
            self.inner.rollback(num_held)
            self._num_held -= num_held
            if not self._num_held:
                self._place = self._before_held
        for _ in range(num_tokens - num_held):
            self._place = self._before.pop()

    def fill_bitmask(self, mask: NDArray[np.int32], row: int) -> None:
        """Write the allowed tokens into mask[row]."""
        if not self.is_within:
            self.inner.fill_bitmask(mask, row)
        self.complete(mask[row])

    def complete(self, bits: NDArray[np.int32]) -> None:
        """Turn the tokens that the grammar allows into those that may come next.

        Args:
            bits: int32 [ceil(V / 32)]; anything within the reasoning.
        """
        if self._place >= 0:
            bits[:] = self._tokens.within[self._place]
        elif self._place == _START:
            if self._tokens.begin_id is not None:
                word, bit = divmod(self._tokens.begin_id, 32)
                bits[word : word + 1].view(np.uint32)[0] |= np.uint32(1 << bit)
        elif self._place != _HELD:
            bits &= ~self._tokens.begins_with_line_end
            bits |= self._tokens.gaps[_HELD - self._place]

    def forced_text(self) -> str:
        """Return the text that must come next, "" if there is a choice."""
        return self.inner.forced_text() if self._place == _HELD else ""

    def forced_tokens(self) -> Sequence[int]:
        """Return tokens that must come next whatever is sampled."""
        return self.inner.forced_tokens() if self._place == _HELD else ()

    def _accept_held(self, token_id: int) -> bool:
        if not self.inner.accept(token_id):
            return False
        if not self._num_held:
            self._before_held = self._place
        self._num_held += 1
        self._place = _HELD
        return True

    def _go(self, place: int | None) -> bool:
        if place is None:
            return False
        self._before.append(self._place)
        self._place = place
        return True


def fill_bitmasks(
    fill: Callable[[Sequence[GrammarMatcher], NDArray[np.int32]], None],
    matchers: Sequence[GrammarMatcher],
    mask: NDArray[np.int32],
) -> None:
    """Write the tokens that each of several matchers allows, those of matchers[i] into mask[i].

    Args:
        fill: a backend's `fill_bitmasks`.
        matchers: the backend's own, and delayed ones of its grammars.
        mask: int32 [len(matchers), ceil(V / 32)].
    """
    delayed = {i: matcher for i, matcher in enumerate(matchers) if isinstance(matcher, DelayedMatcher)}
    inner = {i: delayed[i].inner if i in delayed else matcher for i, matcher in enumerate(matchers)}
    held = [i for i in inner if i not in delayed or not delayed[i].is_within]
    if len(held) == len(matchers):
        fill(list(inner.values()), mask)
    elif held:
        rows = np.empty((len(held), mask.shape[1]), dtype=np.int32)
        fill([inner[i] for i in held], rows)
        mask[held] = rows
    for i, matcher in delayed.items():
        matcher.complete(mask[i])
