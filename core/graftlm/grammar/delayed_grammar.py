r"""Grammars that wait: what a model thinks before it answers is free, and the grammar holds what follows.

    <think> free text </think> \n\n {"answer": ...}
    begin                end   gap  what the grammar holds

Backends know nothing of it: their matchers begin where the gap ends.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
from numpy.typing import NDArray

from graftlm.contracts import CompiledGrammar, GrammarMatcher
from graftlm.errors import SamplingParamsError
from graftlm.sampling_params import MAX_TAG_CHARS
from graftlm.tokenization import Tokenizer

__all__ = [
    "MAX_END_BYTES",
    "DelayedGrammar",
    "Reasoning",
    "ReasoningTokens",
    "TextTokens",
    "check_reasoning",
    "fill_bitmasks",
    "matcher_behind",
]

#: Of the text that ends the reasoning.
MAX_END_BYTES: Final = 4 * MAX_TAG_CHARS

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


class TextTokens:
    """The tokens of a vocabulary that are text: neither special nor stop tokens, of which outputs hold none.

    Attributes:
        texts: each token's bytes, b"" for those that are none.
        num_words: ceil(V / 32).
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, stop_token_ids: Sequence[int]) -> None:
        stops = frozenset(stop_token_ids)
        self.num_words = -(-vocab_size // 32)
        self.texts = [
            b"" if i in stops or tokenizer.is_special(i) else tokenizer.token_bytes(i)
            for i in range(min(vocab_size, tokenizer.vocab_size))
        ]

    def text_of(self, token_id: int) -> bytes:
        """Return what a token adds to the text; b"" for special, stop and unknown ones."""
        return self.texts[token_id] if 0 <= token_id < len(self.texts) else b""

    def mask(self, token_ids: Iterable[int]) -> NDArray[np.int32]:
        """Return the bitmask of some tokens, int32 [ceil(V / 32)]."""
        bits = np.zeros(32 * self.num_words, dtype=np.uint8)
        bits[list(token_ids)] = 1
        return np.packbits(bits, bitorder="little").view(np.int32)

    @cached_property
    def all(self) -> NDArray[np.int32]:
        """The bitmask of those that are text."""
        return self.mask(i for i, text in enumerate(self.texts) if text)


def check_reasoning(reasoning: Reasoning, tokenizer: Tokenizer) -> None:
    """Refuse tags that are no text of a vocabulary.

    Raises:
        SamplingParamsError: the reasoning's end is a special token, or its beginning no single token that is text.
    """
    begin, end = reasoning.begin, reasoning.end
    if begin is not None and tokenizer.token_of(begin) is None:
        message = f"reasoning_begin: {begin!r} is no single token of this model's text"
        raise SamplingParamsError(message, param="reasoning_begin")
    if tokenizer.is_special_text(end):
        message = f"reasoning_end: {end!r} is a special token of this model, so never text"
        raise SamplingParamsError(message, param="reasoning_end")


class ReasoningTokens:
    """How the tokens of a vocabulary spell the end of a model's reasoning.

    The output does not end within the reasoning: it has no answer yet. A token that goes on after the end is not
    allowed, unless it does so with line ends.

    Args:
        reasoning: as `check_reasoning` takes it.

    Attributes:
        begin_id: the token that `Reasoning.begin` is, None if that is None.
        within: bitmasks, int32 [ceil(V / 32)], of what may come once so many bytes of the end are there; many are one
            array.
        gaps: bitmasks, int32 [3, ceil(V / 32)], of tokens that are up to so many line ends.
        begins_with_line_end: a bitmask, int32 [ceil(V / 32)].
    """

    def __init__(self, reasoning: Reasoning, tokens: TextTokens, tokenizer: Tokenizer) -> None:
        self._end = reasoning.end.encode()
        self._back = _borders(self._end)
        self.text_of = tokens.text_of
        self.begin_id = None if reasoning.begin is None else tokenizer.token_of(reasoning.begin)
        self.within = self._within(tokens)
        begins = [i for i, text in enumerate(tokens.texts) if text.startswith(b"\n")]
        line_ends = [[i for i in begins if tokens.texts[i] in (b"\n", b"\n\n")[:most]] for most in (0, 1, 2)]
        self.gaps = np.stack([tokens.mask(ids) for ids in line_ends])
        self.begins_with_line_end = tokens.mask(begins)

    def after(self, num_matched: int, text: bytes) -> int | None:
        """Return the place that text leads to from within the reasoning; None if it is not allowed.

        Args:
            num_matched: bytes of the end that are there.
        """
        for i, byte in enumerate(text):
            while num_matched and self._end[num_matched] != byte:
                num_matched = self._back[num_matched]
            num_matched += self._end[num_matched] == byte
            if num_matched == len(self._end):
                return after_line_ends(_MAX_LINE_ENDS, text[i + 1 :])
        return num_matched

    def behind(self, token_ids: Sequence[int]) -> int:
        """Return how many bytes of the end a prompt that ends within the reasoning ends with."""
        place = 0
        for token_id in token_ids[-len(self._end) :]:
            text = self.text_of(int(token_id))
            place = max(0, self.after(place, text) or 0) if text else 0
        return place

    def _within(self, tokens: TextTokens) -> list[NDArray[np.int32]]:
        """Return the bitmasks of `within`: all text but tokens that lead past the end."""
        texts, size = tokens.texts, len(self._end)
        past = [i for i, text in enumerate(texts) if self._end[-1:] in text]
        completing = [[i for i in past if texts[i].startswith(self._end[k:])] for k in range(size)]
        completing[0] = [i for i in past if self._end in texts[i]]
        masks: dict[frozenset[int], NDArray[np.int32]] = {}
        rows = []
        for num_matched in range(size):
            suspects, k = set(completing[0]), num_matched
            while k:
                suspects.update(completing[k])
                k = self._back[k]
            refused = frozenset(i for i in suspects if self.after(num_matched, texts[i]) is None)
            if refused not in masks:
                masks[refused] = tokens.all & ~tokens.mask(refused)
            rows.append(masks[refused])
        return rows


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

    def __init__(self, inner: CompiledGrammar, tokens: ReasoningTokens) -> None:
        self._inner = inner
        self._tokens = tokens

    def matcher(self) -> GrammarMatcher:
        """Return a fresh matcher at the start."""
        return self.matcher_behind(())

    def matcher_behind(self, prompt_token_ids: Sequence[int]) -> GrammarMatcher:
        """Return a fresh matcher at the start of an output; the prompt may have begun to end the reasoning.

        Args:
            prompt_token_ids: of its end at least as many tokens as the reasoning's end has bytes, or all.
        """
        is_open = self._tokens.begin_id is None
        place = self._tokens.behind(prompt_token_ids) if is_open else _START
        return DelayedMatcher(self._inner.matcher(), self._tokens, place)


def matcher_behind(compiled: CompiledGrammar, prompt_token_ids: Sequence[int]) -> GrammarMatcher:
    """Return a fresh matcher of a grammar, delayed or not, behind a prompt, as `DelayedGrammar.matcher_behind` does."""
    if isinstance(compiled, DelayedGrammar):
        return compiled.matcher_behind(prompt_token_ids)
    return compiled.matcher()


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
    if not delayed:
        fill(matchers, mask)
        return
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
