r"""Grammars that start after a model's reasoning. The reasoning is free text; the answer conforms to the grammar.

    <think> free text </think> \n\n {"answer": ...}
    begin                end   gap  constrained by the grammar

Grammar backends do not process the reasoning: their matchers start at the end of the gap.
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

#: Maximum length of `Reasoning.end` in bytes.
MAX_END_BYTES: Final = 4 * MAX_TAG_CHARS

_MAX_LINE_ENDS: Final = 2


@dataclass(frozen=True, slots=True)
class Reasoning:
    """The texts that start and end a reasoning, which comes before the text that a grammar constrains.

    Attributes:
        end: text that ends the reasoning. Up to two line ends may follow.
        begin: text, a single token, with which the output may start. If the output starts with another token, it has no
            reasoning, and the grammar constrains all of it. None: the output starts within the reasoning.
    """

    end: str
    begin: str | None = None


@dataclass(frozen=True, slots=True)
class BeforeBegin:
    """The place before the first token. This token is either `Reasoning.begin` or the first token of the grammar."""


@dataclass(frozen=True, slots=True)
class WithinReasoning:
    """A place within the reasoning; the text ends with the first `num_matched` bytes of `Reasoning.end`."""

    num_matched: int


@dataclass(frozen=True, slots=True)
class WithinGap:
    """A place after the end of the reasoning, where `num_left` (at least one) more line ends are allowed."""

    num_left: int


@dataclass(frozen=True, slots=True)
class WithinGrammar:
    """A place where only the grammar decides which tokens are allowed."""


#: The state of a delayed matcher.
Place: TypeAlias = BeforeBegin | WithinReasoning | WithinGap | WithinGrammar


class TextTokens:
    """The tokens of a vocabulary that are text: neither special nor stop tokens.

    Attributes:
        texts: the bytes of each token; b"" for tokens that are not text.
        num_words: ceil(V / 32), the number of int32 words of a bitmask.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, stop_token_ids: Sequence[int]) -> None:
        stops = frozenset(stop_token_ids)
        self.num_words = -(-vocab_size // 32)
        self.texts = [
            b"" if i in stops or tokenizer.is_special(i) else tokenizer.token_bytes(i)
            for i in range(min(vocab_size, tokenizer.vocab_size))
        ]

    def text_of(self, token_id: int) -> bytes:
        """Return the bytes that a token adds to the text; b"" for special, stop and unknown tokens."""
        return self.texts[token_id] if 0 <= token_id < len(self.texts) else b""

    def mask(self, token_ids: Iterable[int]) -> NDArray[np.int32]:
        """Return the bitmask of the given tokens, int32 [ceil(V / 32)]."""
        bits = np.zeros(32 * self.num_words, dtype=np.uint8)
        bits[list(token_ids)] = 1
        return np.packbits(bits, bitorder="little").view(np.int32)

    @cached_property
    def all(self) -> NDArray[np.int32]:
        """The bitmask of all tokens that are text, int32 [ceil(V / 32)]."""
        return self.mask(i for i, text in enumerate(self.texts) if text)


def check_reasoning(reasoning: Reasoning, tokenizer: Tokenizer) -> None:
    """Check that the tokenizer can encode the texts of a reasoning as text tokens.

    Raises:
        SamplingParamsError: `end` is a special token, or `begin` is not a single token of text.
    """
    begin, end = reasoning.begin, reasoning.end
    if begin is not None and tokenizer.token_of(begin) is None:
        message = f"reasoning_begin: {begin!r} is not a single token of text of this model"
        raise SamplingParamsError(message, param="reasoning_begin")
    if tokenizer.is_special_text(end):
        message = f"reasoning_end: {end!r} is a special token of this model, so it never occurs in text"
        raise SamplingParamsError(message, param="reasoning_end")


class ReasoningTokens:
    """The allowed tokens within a model's reasoning and in the gap after it.

    Stop tokens are not allowed within the reasoning, because there is no answer yet. A token that contains the end and
    continues after it is allowed only if it continues with line ends.

    Args:
        reasoning: the reasoning, which `check_reasoning` has checked.
        tokens: the tokens that are text.
        tokenizer: the model's tokenizer.

    Attributes:
        begin_id: the token of `Reasoning.begin`; None if `Reasoning.begin` is None.
        within: for each number of matched bytes of the end, the bitmask of allowed tokens, int32 [ceil(V / 32)]. Equal
            bitmasks share an array.
        gaps: int32 [3, ceil(V / 32)]; gaps[n] is the bitmask of the tokens that consist of one to n line ends.
        begins_with_line_end: the bitmask of the tokens that start with a line end, int32 [ceil(V / 32)].
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
        """Return the place after a text within the reasoning; None if the text is not allowed.

        Args:
            num_matched: number of bytes of `Reasoning.end` that were matched before the text.
            text: the bytes of a token.
        """
        for i, byte in enumerate(text):
            while num_matched and self._end[num_matched] != byte:
                num_matched = self._back[num_matched]
            num_matched += self._end[num_matched] == byte
            if num_matched == len(self._end):
                return after_line_ends(_MAX_LINE_ENDS, text[i + 1 :])
        return WithinReasoning(num_matched)

    def behind(self, token_ids: Sequence[int]) -> WithinReasoning:
        """Return the place after a prompt that ends within the reasoning, perhaps with a part of `Reasoning.end`."""
        num_matched = 0
        for token_id in token_ids[-len(self._end) :]:
            text = self.text_of(int(token_id))
            place = self.after(num_matched, text) if text else None
            num_matched = place.num_matched if isinstance(place, WithinReasoning) else 0
        return WithinReasoning(num_matched)

    def _within(self, tokens: TextTokens) -> list[NDArray[np.int32]]:
        """Return the bitmasks of `within`: text tokens, except those with other text than line ends after the end."""
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
    """Return the place after a text of at most `num_left` line ends; None if the text is anything else."""
    if text.strip(b"\n") or len(text) > num_left:
        return None
    return WithinGrammar() if len(text) == num_left else WithinGap(num_left - len(text))


def _borders(pattern: bytes) -> list[int]:
    """Return, for each k, the number of bytes of a pattern that still match after a mismatch at byte k (KMP)."""
    back = [0] * (len(pattern) + 1)
    for k in range(2, len(pattern) + 1):
        size = back[k - 1]
        while size and pattern[size] != pattern[k - 1]:
            size = back[size]
        back[k] = size + (pattern[size] == pattern[k - 1])
    return back


class DelayedGrammar(CompiledGrammar):
    """A compiled grammar that starts after the end of the reasoning."""

    def __init__(self, inner: CompiledGrammar, tokens: ReasoningTokens) -> None:
        self._inner = inner
        self._tokens = tokens

    def matcher(self) -> GrammarMatcher:
        """Return a new matcher in the start state."""
        return self.matcher_behind(())

    def matcher_behind(self, prompt_token_ids: Sequence[int]) -> GrammarMatcher:
        """Return a new matcher for the output after a prompt, which may end with a part of `Reasoning.end`.

        Args:
            prompt_token_ids: the last tokens of the prompt, at least one per byte of `Reasoning.end`, or all tokens.
        """
        place = self._tokens.behind(prompt_token_ids) if self._tokens.begin_id is None else BeforeBegin()
        return DelayedMatcher(self._inner.matcher(), self._tokens, place)


def matcher_behind(compiled: CompiledGrammar, prompt_token_ids: Sequence[int]) -> GrammarMatcher:
    """Return a new matcher of any grammar for the output after a prompt; see `DelayedGrammar.matcher_behind`."""
    if isinstance(compiled, DelayedGrammar):
        return compiled.matcher_behind(prompt_token_ids)
    return compiled.matcher()


class DelayedMatcher(GrammarMatcher):
    """The state of one request, first within the reasoning, then in the grammar.

    Attributes:
        inner: the matcher of the grammar.
    """

    def __init__(self, inner: GrammarMatcher, tokens: ReasoningTokens, place: Place) -> None:
        self.inner = inner
        self._tokens = tokens
        self._place = place
        #: The place before each accepted token that was not passed to `inner`; `_before_inner` is the place before the
        #: first token that was passed to `inner`.
        self._before: list[Place] = []
        self._before_inner = place
        self._num_inner = 0  # number of tokens that `inner` has accepted

    @property
    def is_within_reasoning(self) -> bool:
        """Whether the state is within the reasoning, where the grammar does not apply."""
        return isinstance(self._place, WithinReasoning)

    @property
    def finished(self) -> bool:
        """Whether the grammar is complete and a stop token was accepted."""
        return self._num_inner > 0 and self.inner.finished

    def accept(self, token_id: int) -> bool:
        """Advance by a token. Return False, and leave the matcher unchanged, if the token is not allowed."""
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
        """Undo the last `num_tokens` accepted tokens."""
        num_inner = min(num_tokens, self._num_inner)
        if num_inner:
            self.inner.rollback(num_inner)
            self._num_inner -= num_inner
            if not self._num_inner:
                self._place = self._before_inner
        for _ in range(num_tokens - num_inner):
            self._place = self._before.pop()

    def fill_bitmask(self, mask: NDArray[np.int32], row: int) -> None:
        """Write the allowed tokens to mask[row]."""
        if not self.is_within_reasoning:
            self.inner.fill_bitmask(mask, row)
        self.complete(mask[row])

    def complete(self, bits: NDArray[np.int32]) -> None:
        """Change the grammar's mask to this matcher's mask, in place.

        Args:
            bits: int32 [ceil(V / 32)], filled by `inner`; within the reasoning its content is ignored.
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
        """Return the forced next text; "" if there is none."""
        return self.inner.forced_text() if isinstance(self._place, WithinGrammar) else ""

    def forced_tokens(self) -> Sequence[int]:
        """Return the forced next tokens."""
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
        """Move to a place. Return False, and do nothing, if the place is None."""
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
    """Write the masks of several matchers; mask[i] is the mask of matchers[i].

    Args:
        fill: the method `fill_bitmasks` of a backend.
        matchers: matchers of the backend, and delayed matchers with an inner matcher of the backend.
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
