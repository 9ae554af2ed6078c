r"""Grammars that begin after a model's reasoning: the reasoning is free text, the answer follows the grammar.

    <think> free text </think> \n\n {"answer": ...}
    begin                end   gap  constrained by the grammar

Grammar backends do not see the reasoning: their matchers begin where the gap ends.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final, TypeAlias

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

_MAX_LINE_ENDS: Final = 2


@dataclass(frozen=True, slots=True)
class Reasoning:
    """What comes before the text that a grammar constrains.

    Attributes:
        end: text that ends it. Up to two line ends may follow.
        begin: text, a single token, with which the output may begin; the grammar constrains an output that begins
            otherwise from its first token on. None: the output begins within the reasoning.
    """

    end: str
    begin: str | None = None


@dataclass(frozen=True, slots=True)
class BeforeBegin:
    """The place before the first token, which may be `Reasoning.begin` or the grammar's first."""


@dataclass(frozen=True, slots=True)
class WithinReasoning:
    """A place within the reasoning; `num_matched` bytes of its end have been matched."""

    num_matched: int


@dataclass(frozen=True, slots=True)
class WithinGap:
    """A place after the end of the reasoning, where up to `num_left` line ends, at least one, may still come."""

    num_left: int


@dataclass(frozen=True, slots=True)
class WithinGrammar:
    """A place where the grammar decides alone."""


#: Where a delayed matcher is.
Place: TypeAlias = BeforeBegin | WithinReasoning | WithinGap | WithinGrammar


class TextTokens:
    """The tokens of a vocabulary that are text: neither special nor stop tokens.

    Attributes:
        texts: each token's bytes, b"" for tokens that are not text.
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
        """The bitmask of all tokens that are text, int32 [ceil(V / 32)]."""
        return self.mask(i for i, text in enumerate(self.texts) if text)


def check_reasoning(reasoning: Reasoning, tokenizer: Tokenizer) -> None:
    """Check that a vocabulary spells the tags as text.

    Raises:
        SamplingParamsError: the reasoning's end is a special token, or its beginning is not a single token of text.
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

    Stop tokens are not allowed within the reasoning, because there is no answer yet. A token that continues past the
    end is not allowed, unless it continues with line ends only.

    Args:
        reasoning: checked by `check_reasoning`.

    Attributes:
        begin_id: the token that spells `Reasoning.begin`; None if that is None.
        within: the bitmask of allowed tokens for each number of matched bytes, int32 [ceil(V / 32)]; many of them are
            one array.
        gaps: int32 [3, ceil(V / 32)]; gaps[n] is the bitmask of the tokens that are one to n line ends.
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

    def after(self, num_matched: int, text: bytes) -> Place | None:
        """Return the place after some text within the reasoning; None if the text is not allowed.

        Args:
            num_matched: bytes of the end that are matched before the text.
        """
        for i, byte in enumerate(text):
            while num_matched and self._end[num_matched] != byte:
                num_matched = self._back[num_matched]
            num_matched += self._end[num_matched] == byte
            if num_matched == len(self._end):
                return after_line_ends(_MAX_LINE_ENDS, text[i + 1 :])
        return WithinReasoning(num_matched)

    def behind(self, token_ids: Sequence[int]) -> WithinReasoning:
        """Return the place after a prompt that ends within the reasoning, and may end with a part of its end."""
        num_matched = 0
        for token_id in token_ids[-len(self._end) :]:
            text = self.text_of(int(token_id))
            place = self.after(num_matched, text) if text else None
            num_matched = place.num_matched if isinstance(place, WithinReasoning) else 0
        return WithinReasoning(num_matched)

    def _within(self, tokens: TextTokens) -> list[NDArray[np.int32]]:
        """Return the bitmasks of `within`: all text but the tokens that continue past the end."""
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


def after_line_ends(num_left: int, text: bytes) -> WithinGap | WithinGrammar | None:
    """Return the place after a text of up to `num_left` line ends; None if the text is anything else."""
    if text.strip(b"\n") or len(text) > num_left:
        return None
    return WithinGrammar() if len(text) == num_left else WithinGap(num_left - len(text))


def _borders(pattern: bytes) -> list[int]:
    """Return, for each k, how many bytes of a pattern still match after a mismatch behind its first k (KMP)."""
    back = [0] * (len(pattern) + 1)
    for k in range(2, len(pattern) + 1):
        size = back[k - 1]
        while size and pattern[size] != pattern[k - 1]:
            size = back[size]
        back[k] = size + (pattern[size] == pattern[k - 1])
    return back


class DelayedGrammar(CompiledGrammar):
    """A compiled grammar that begins after the end of the reasoning."""

    def __init__(self, inner: CompiledGrammar, tokens: ReasoningTokens) -> None:
        self._inner = inner
        self._tokens = tokens

    def matcher(self) -> GrammarMatcher:
        """Return a fresh matcher at the start."""
        return self.matcher_behind(())

    def matcher_behind(self, prompt_token_ids: Sequence[int]) -> GrammarMatcher:
        """Return a fresh matcher at the start of an output; the prompt may have begun to spell the reasoning's end.

        Args:
            prompt_token_ids: the last tokens of the prompt: at least as many as the reasoning's end has bytes, or all.
        """
        place = self._tokens.behind(prompt_token_ids) if self._tokens.begin_id is None else BeforeBegin()
        return DelayedMatcher(self._inner.matcher(), self._tokens, place)


def matcher_behind(compiled: CompiledGrammar, prompt_token_ids: Sequence[int]) -> GrammarMatcher:
    """Return a fresh matcher of any grammar after a prompt, as `DelayedGrammar.matcher_behind` does."""
    if isinstance(compiled, DelayedGrammar):
        return compiled.matcher_behind(prompt_token_ids)
    return compiled.matcher()


class DelayedMatcher(GrammarMatcher):
    """One request's place in the reasoning, and then in a grammar.

    Attributes:
        inner: its place in the grammar.
    """

    def __init__(self, inner: GrammarMatcher, tokens: ReasoningTokens, place: Place) -> None:
        self.inner = inner
        self._tokens = tokens
        self._place = place
        #: The place before each token that `inner` has not accepted, and before the first that it has.
        self._before: list[Place] = []
        self._before_inner = place
        self._num_inner = 0  # tokens that `inner` has accepted

    @property
    def is_within_reasoning(self) -> bool:
        """Whether it is within the reasoning, where the grammar does not apply."""
        return isinstance(self._place, WithinReasoning)

    @property
    def finished(self) -> bool:
        """Whether the grammar has been completed and a stop token accepted."""
        return self._num_inner > 0 and self.inner.finished

    def accept(self, token_id: int) -> bool:
        """Advance over a token; False leaves the matcher unchanged."""
        place = self._place
        if isinstance(place, WithinReasoning):
            text = self._tokens.text_of(token_id)
            return self._go(self._tokens.after(place.num_matched, text) if text else None)
        if isinstance(place, BeforeBegin) and token_id == self._tokens.begin_id:
            return self._go(WithinReasoning(0))
        if isinstance(place, WithinGap):
            text = self._tokens.text_of(token_id)
            if text.startswith(b"\n"):
                return self._go(after_line_ends(place.num_left, text))
        return self._accept_inner(token_id)

    def rollback(self, num_tokens: int) -> None:
        """Undo the latest accepted tokens."""
        num_inner = min(num_tokens, self._num_inner)
        if num_inner:
            self.inner.rollback(num_inner)
            self._num_inner -= num_inner
            if not self._num_inner:
                self._place = self._before_inner
        for _ in range(num_tokens - num_inner):
            self._place = self._before.pop()

    def fill_bitmask(self, mask: NDArray[np.int32], row: int) -> None:
        """Write the allowed tokens into mask[row]."""
        if not self.is_within_reasoning:
            self.inner.fill_bitmask(mask, row)
        self.complete(mask[row])

    def complete(self, bits: NDArray[np.int32]) -> None:
        """Turn the tokens that the grammar allows into those that may come next, in place.

        Args:
            bits: int32 [ceil(V / 32)], filled by `inner`; within the reasoning, any content.
        """
        place = self._place
        if isinstance(place, WithinReasoning):
            bits[:] = self._tokens.within[place.num_matched]
        elif isinstance(place, BeforeBegin):
            if self._tokens.begin_id is not None:
                word, bit = divmod(self._tokens.begin_id, 32)
                bits[word : word + 1].view(np.uint32)[0] |= np.uint32(1 << bit)
        elif isinstance(place, WithinGap):
            bits &= ~self._tokens.begins_with_line_end
            bits |= self._tokens.gaps[place.num_left]

    def forced_text(self) -> str:
        """Return the text that must come next, "" if there is a choice."""
        return self.inner.forced_text() if isinstance(self._place, WithinGrammar) else ""

    def forced_tokens(self) -> Sequence[int]:
        """Return tokens that must come next whatever is sampled."""
        return self.inner.forced_tokens() if isinstance(self._place, WithinGrammar) else ()

    def _accept_inner(self, token_id: int) -> bool:
        if not self.inner.accept(token_id):
            return False
        if not self._num_inner:
            self._before_inner = self._place
        self._num_inner += 1
        self._place = WithinGrammar()
        return True

    def _go(self, place: Place | None) -> bool:
        """Move to a place; None is not allowed, and leaves the matcher unchanged."""
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
    """Write the tokens that each of several matchers allows: those of matchers[i] into mask[i].

    Args:
        fill: a backend's `fill_bitmasks`.
        matchers: the backend's own, and delayed matchers around its own.
        mask: int32 [len(matchers), ceil(V / 32)].
    """
    delayed = {i: matcher for i, matcher in enumerate(matchers) if isinstance(matcher, DelayedMatcher)}
    if not delayed:
        fill(matchers, mask)
        return
    inner = {i: delayed[i].inner if i in delayed else matcher for i, matcher in enumerate(matchers)}
    constrained = [i for i in inner if i not in delayed or not delayed[i].is_within_reasoning]
    if len(constrained) == len(matchers):
        fill(list(inner.values()), mask)
    elif constrained:
        rows = np.empty((len(constrained), mask.shape[1]), dtype=np.int32)
        fill([inner[i] for i in constrained], rows)
        mask[constrained] = rows
    for i, matcher in delayed.items():
        matcher.complete(mask[i])
