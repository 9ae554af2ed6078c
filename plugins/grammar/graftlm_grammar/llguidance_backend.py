"""The `llguidance` backend: the llguidance library's Earley parser over lexemes, which computes masks on demand."""

import os
import re
from collections.abc import Sequence
from typing import Any, Final, cast

import llguidance
import numpy as np
from numpy.typing import NDArray

from graftlm.contracts import (
    CompiledGrammar,
    GrammarBackend,
    GrammarContext,
    GrammarKind,
    GrammarMatcher,
    GrammarSpec,
)
from graftlm.errors import GrammarError
from graftlm_grammar.forced_tokens import find_forced_tokens
from graftlm_grammar.llguidance_lark import LarkGrammar, spec_to_lark
from graftlm_grammar.options import LLGuidanceOptions
from graftlm_grammar.spec_text import check_text
from graftlm_grammar.token_bytes import token_bytes

__all__ = ["LLGuidanceBackend"]

_MAX_TEXT_LEN: Final = 1 << 18
_MAX_MASK_THREADS: Final = 8
_POSITION: Final = re.compile(r"^(?:at )?\d+\(\d+\): |^failed to compile JSON schema: ")
_UNSATISFIABLE: Final = re.compile("Unsatisfiable schema: (.*)")


class LLGuidanceBackend(GrammarBackend):
    """Compiles specifications for one tokenizer.

    Args:
        options: see `LLGuidanceOptions`.
        context: the tokenizer and its stop tokens.

    Raises:
        GrammarError: no stop token is in the vocabulary.
    """

    def __init__(self, options: LLGuidanceOptions, context: GrammarContext) -> None:
        self._options = options
        self._vocabulary = _Vocabulary(context)
        self._executor: Any = llguidance.LLExecutor(min(_MAX_MASK_THREADS, os.cpu_count() or 1))
        self._limits: Any = llguidance.LLParserLimits(
            max_grammar_size=200_000, max_lexer_states=100_000, verbose_errors=False
        )

    def check(self, spec: GrammarSpec) -> tuple[str, ...]:
        """Check a specification like `compile`, but without the vocabulary. Returns the paths that are not enforced."""
        grammar = self._grammar(spec)
        is_error, messages = llguidance.LLMatcher.validate_grammar_with_warnings(grammar.text, limits=self._limits)
        if is_error:
            raise _refusal(spec.kind, messages[0])
        return grammar.unenforced

    def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        """Create the parser. The allowed tokens of a state are computed when the state is reached."""
        grammar = self._grammar(spec)
        matcher: Any = llguidance.LLMatcher(self._vocabulary.tokenizer, grammar.text, log_level=0, limits=self._limits)
        mask = np.zeros((1, -(-self._vocabulary.size // 32)), dtype=np.int32)
        if not matcher.is_error():
            matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)  # most grammars over a limit fail here
        if matcher.is_error():
            raise _refusal(spec.kind, matcher.get_error())
        return _Compiled(matcher, self._vocabulary)

    def fill_bitmasks(self, matchers: Sequence[GrammarMatcher], mask: NDArray[np.int32]) -> None:
        """Write the masks of several matchers, in several threads. Row i is the mask of matcher i."""
        own = [cast(_Matcher, matcher) for matcher in matchers]
        rows = [(matcher.library_matcher, i) for i, matcher in enumerate(own) if not matcher.finished]
        if rows:
            self._executor.unsafe_compute_mask_ptr(rows, mask.ctypes.data, mask.shape[1] * 4, len(mask))
        for i, matcher in enumerate(own):
            matcher.trim(mask, i)

    def _grammar(self, spec: GrammarSpec) -> LarkGrammar:
        check_text(spec, _MAX_TEXT_LEN)
        return spec_to_lark(spec, self._options)


class _Vocabulary:
    """The vocabulary in the library's form. All stop tokens are marked as end tokens."""

    def __init__(self, context: GrammarContext) -> None:
        self.size = context.vocab_size
        self.stop_token_ids = frozenset(token_id for token_id in context.stop_token_ids if token_id < self.size)
        if not self.stop_token_ids:
            raise GrammarError(
                f"expected a stop token below the vocabulary's size, {self.size}, got {context.stop_token_ids}"
            )
        tokens = token_bytes(context.tokenizer_json, self.size)
        for token_id in self.stop_token_ids:
            tokens[token_id] = b""
        stop_token_ids = sorted(self.stop_token_ids)
        self.tokenizer: Any = llguidance.LLTokenizer(
            llguidance.TokenizerWrapper(_Tokens(tokens, stop_token_ids)), eos_token=stop_token_ids
        )
        bits = np.ones(-(-self.size // 32) * 32, dtype=np.uint8)
        bits[stop_token_ids] = 0
        self.no_stop_words = np.packbits(bits, bitorder="little").view(np.int32)
        num_spare_bits = -self.size % 32
        self.last_word = np.int32(-1) if num_spare_bits == 0 else np.int32((1 << (32 - num_spare_bits)) - 1)


class _Tokens:
    """The attributes of a tokenizer that the library reads. The library tokenizes text itself, longest token first."""

    bos_token_id = None

    def __init__(self, tokens: list[bytes], stop_token_ids: list[int]) -> None:
        self.tokens = tokens
        self.eos_token_id = stop_token_ids[0]
        self.special_token_ids = stop_token_ids

    def __call__(self, text: bytes | str) -> list[int]:
        raise NotImplementedError("the library does not tokenize text: forced tokens are found from masks")


class _Compiled(CompiledGrammar):
    def __init__(self, matcher: Any, vocabulary: _Vocabulary) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary

    def matcher(self) -> GrammarMatcher:
        """Return a new matcher in the start state."""
        return _Matcher(self._matcher.deep_copy(), self._vocabulary)


class _Matcher(GrammarMatcher):
    """A matcher that does not pass stop tokens to the library, so a stop token does not change the library's state."""

    def __init__(self, matcher: Any, vocabulary: _Vocabulary) -> None:
        self.library_matcher = matcher
        self._vocabulary = vocabulary
        self._finished = False

    def accept(self, token_id: int) -> bool:
        """Advance by a token. Returns False, and does not change the matcher, if the token is not allowed."""
        matcher = self.library_matcher
        if self._finished or not 0 <= token_id < self._vocabulary.size:
            return False
        if token_id in self._vocabulary.stop_token_ids:
            self._finished = bool(matcher.is_accepting())
            return self._finished
        accepted = matcher.validate_tokens([token_id]) == 1 and matcher.consume_token(token_id)
        self._check()
        return bool(accepted)

    def rollback(self, num_tokens: int) -> None:
        """Undo the last `num_tokens` accepted tokens."""
        if num_tokens and self._finished:
            self._finished = False
            num_tokens -= 1
        if num_tokens:
            self.library_matcher.rollback(num_tokens)
            self._check()

    def fill_bitmask(self, mask: NDArray[np.int32], row: int) -> None:
        """Write the allowed tokens to mask[row].

        Raises:
            GrammarError: the text so far is too ambiguous under the grammar.
        """
        if not self._finished:
            words = mask[row]
            self.library_matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        self.trim(mask, row)

    def trim(self, mask: NDArray[np.int32], row: int) -> None:
        """Clear bits that the library may have set incorrectly.

        These are the bits from V on, and the bits of stop tokens while the text is incomplete. After a stop token was
        accepted, all bits are cleared.

        Raises:
            GrammarError: the same as for `fill_bitmask`.
        """
        self._check()
        if self._finished:
            mask[row] = 0
            return
        mask[row, -1] &= self._vocabulary.last_word
        if not self.library_matcher.is_accepting():  # if no token is allowed, the library allows the stop token
            mask[row] &= self._vocabulary.no_stop_words

    def forced_text(self) -> str:
        """Return the forced next text, up to the last complete character."""
        if self._finished or self.library_matcher.is_accepting():
            return ""
        forced: bytes = self.library_matcher.compute_ff_bytes()
        return forced.decode(errors="ignore")

    def forced_tokens(self) -> list[int]:
        """Return the forced next tokens, at most 64."""
        return find_forced_tokens(self, self._vocabulary.size)

    @property
    def finished(self) -> bool:
        """Whether a stop token was accepted."""
        return self._finished

    def _check(self) -> None:
        if self.library_matcher.is_error():
            raise GrammarError(f"llguidance: {_first_line(self.library_matcher.get_error())}")


def _refusal(kind: GrammarKind, message: str) -> GrammarError:
    return GrammarError(f"{kind.value}: {_first_line(message)}")


def _first_line(message: str) -> str:
    line = message.strip().split("\n")[0]
    while (shorter := _POSITION.sub("", line)) != line:
        line = shorter
    if line in ("NoExtension", "NoExtensionBias"):
        return "no tokens of the vocabulary form an allowed text"
    return _UNSATISFIABLE.sub(r"no value is valid: \1", line)[:300]
