"""The `outlines` backend: automata over tokens, with the outlines_core library (arXiv:2307.09702)."""

from typing import Any, Final

import numpy as np
import outlines_core
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
from graftlm_grammar.choice import choices_to_ebnf, parse_choices
from graftlm_grammar.ebnf import MAX_COUNT, read_ebnf
from graftlm_grammar.forced_tokens import MAX_FORCED_TOKENS, find_forced_tokens
from graftlm_grammar.json_ebnf import RegularJsonRules
from graftlm_grammar.json_schema import translate_schema
from graftlm_grammar.options import OutlinesOptions
from graftlm_grammar.outlines_index import IndexBuilder
from graftlm_grammar.regex import regex_to_ebnf
from graftlm_grammar.regular import inlined, rust_regex
from graftlm_grammar.spec_text import check_text, reading_regex
from graftlm_grammar.token_bytes import token_bytes

__all__ = ["OutlinesBackend"]

_MAX_TEXT_LEN: Final = 1 << 16
_MAX_ROLLBACK: Final = 1024  # tokens that the library can undo; for more, all tokens are accepted again from the start
_MAX_ROWS_BYTES: Final = 1 << 24
# Without \z at the end, the library uses the first alternative that matches, for example `a` of `a|ab`. The leading
# U+0000 is needed because an expression that matches the empty text must not start with \z.
_WHOLE: Final = r"\x{{0}}(?:{})\z"


class OutlinesBackend(GrammarBackend):
    """Compiles specifications for one tokenizer, one after the other.

    Args:
        options: see `OutlinesOptions`.
        context: the tokenizer and its stop tokens.
    """

    def __init__(self, options: OutlinesOptions, context: GrammarContext) -> None:
        self._options = options
        self._tokens = _Tokens(context)
        self._builder = IndexBuilder(self._tokens.vocabulary(), options.max_compile_s, options.max_index_mib << 20)

    def check(self, spec: GrammarSpec) -> tuple[str, ...]:
        """Check a specification as `compile` does, except the size of its automaton, which only `compile` checks.

        Returns: the paths that are not enforced.
        """
        return self._regex(spec)[1]

    def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        """Compute all states that tokens can lead to.

        Raises:
            GrammarError: the specification is not supported, or its compilation needs too much time or memory.
        """
        regex, _ = self._regex(spec)
        try:
            return _Compiled(self._builder.build(_WHOLE.format(regex)), self._tokens)
        except GrammarError as error:
            raise GrammarError(f"{spec.kind.value}: {error}") from error

    def _regex(self, spec: GrammarSpec) -> tuple[str, tuple[str, ...]]:
        """Return the regular expression of a specification, and the paths that are not enforced."""
        kind = spec.kind.value
        check_text(spec, _MAX_TEXT_LEN)
        ebnf, unenforced = self._ebnf(spec)
        try:
            return rust_regex(inlined(read_ebnf(ebnf, MAX_COUNT))), unenforced
        except RecursionError:
            raise GrammarError(f"{kind}: nested too deeply for outlines; use xgrammar or llguidance") from None
        except GrammarError as error:
            raise GrammarError(f"{kind}: {str(error).removeprefix('ebnf: ')}") from None

    def _ebnf(self, spec: GrammarSpec) -> tuple[str, tuple[str, ...]]:
        if spec.kind is GrammarKind.JSON_SCHEMA:
            translated = translate_schema(spec.text, self._options, spec.strict, rules=RegularJsonRules)
            return translated.ebnf, translated.unenforced
        if spec.kind is GrammarKind.REGEX:
            with reading_regex():
                return f"root ::= {regex_to_ebnf(spec.text)}", ()
        if spec.kind is GrammarKind.CHOICE:
            return choices_to_ebnf(parse_choices(spec.text)), ()
        raise GrammarError(f"outlines does not support {spec.kind.value}; use xgrammar or llguidance")


class _Tokens:
    """The vocabulary in the library's form. The only stop token is V, and U+0000 is V + 1. It has no special tokens."""

    def __init__(self, context: GrammarContext) -> None:
        self.vocab_size = context.vocab_size
        self.stop_ids = frozenset(i for i in context.stop_token_ids if i < context.vocab_size)
        found = token_bytes(context.tokenizer_json, context.vocab_size)
        self.bytes_of = [b"" if i in self.stop_ids else token for i, token in enumerate(found)]
        self.stop_row: NDArray[np.int32] = np.zeros(self.num_words, dtype=np.int32)
        for stop_id in self.stop_ids:
            self.stop_row.view(np.uint32)[stop_id // 32] |= np.uint32(1 << stop_id % 32)

    @property
    def num_words(self) -> int:
        """Number of int32 words in a row of a mask."""
        return -(-self.vocab_size // 32)

    @property
    def start_id(self) -> int:
        """Id of the token U+0000, with which each text starts."""
        return self.vocab_size + 1

    def vocabulary(self) -> Any:
        """Return the library's vocabulary."""
        ids: dict[bytes, list[int]] = {b"\0": [self.start_id]}
        for token_id, token in enumerate(self.bytes_of):
            if token and b"\0" not in token:
                ids.setdefault(token, []).append(token_id)
        return outlines_core.Vocabulary(self.vocab_size, ids)


class _Compiled(CompiledGrammar):
    def __init__(self, index: Any, tokens: _Tokens) -> None:
        self._index = index
        self._tokens = tokens
        self._rows: dict[int, NDArray[np.int32]] = {}
        self.forced_texts: dict[int, str] = {}  # state -> forced text
        self._max_rows = _MAX_ROWS_BYTES // (4 * tokens.num_words)

    def matcher(self) -> GrammarMatcher:
        """Return a new matcher in the start state."""
        return _Matcher(self, outlines_core.Guide(self._index, max_rollback=_MAX_ROLLBACK), self._tokens)

    def is_complete(self, guide: Any) -> bool:
        """Return whether the output may end in a guide's state."""
        return bool(self._index.is_final_state(guide.get_state()))

    def row(self, guide: Any) -> NDArray[np.int32]:
        """Return the mask of a guide's state: int32 [ceil(V / 32)]. The caller must not change it."""
        state = guide.get_state()
        row = self._rows.get(state)
        if row is None:
            wide = np.zeros(self._tokens.num_words + 1, dtype=np.int32)  # the library sets bit V if the text may end
            guide.write_mask_into(wide.ctypes.data, wide.size, wide.itemsize)
            wide[self._tokens.vocab_size // 32] &= np.int32((1 << self._tokens.vocab_size % 32) - 1)
            row = wide[: self._tokens.num_words]
            if self.is_complete(guide):
                row |= self._tokens.stop_row
            if len(self._rows) < self._max_rows:
                self._rows[state] = row
        return row


class _Matcher(GrammarMatcher):
    def __init__(self, compiled: _Compiled, guide: Any, tokens: _Tokens) -> None:
        self._compiled = compiled
        self._guide = guide
        self._tokens = tokens
        self._accepted: list[int] = []
        self._finished = False
        self._guide.advance(tokens.start_id, return_tokens=False)

    def accept(self, token_id: int) -> bool:
        """Advance by a token. Returns False, and does not change the matcher, if the token is not allowed."""
        if self._finished or not 0 <= token_id < self._tokens.vocab_size:
            return False
        if token_id in self._tokens.stop_ids:
            self._finished = self._compiled.is_complete(self._guide)
            return self._finished
        try:
            self._guide.advance(token_id, return_tokens=False)
        except ValueError:  # the library raises it if the token is not allowed
            return False
        self._accepted.append(token_id)
        return True

    def rollback(self, num_tokens: int) -> None:
        """Undo the last `num_tokens` accepted tokens."""
        if self._finished and num_tokens:
            self._finished = False
            num_tokens -= 1
        if num_tokens == 0:
            return
        del self._accepted[len(self._accepted) - num_tokens :]
        if num_tokens <= self._guide.get_allowed_rollback():
            self._guide.rollback_state(num_tokens)
            return
        self._guide.reset()
        for token_id in [self._tokens.start_id, *self._accepted]:
            self._guide.advance(token_id, return_tokens=False)

    def fill_bitmask(self, mask: NDArray[np.int32], row: int) -> None:
        """Write the allowed tokens to mask[row]."""
        mask[row] = 0 if self._finished else self._compiled.row(self._guide)

    def forced_text(self) -> str:
        """Return the forced next text: at most 64 tokens, up to the last complete character."""
        if self._finished:
            return ""
        state, known = self._guide.get_state(), self._compiled.forced_texts
        if state not in known:
            known[state] = self._forced_text()
        return known[state]

    def _forced_text(self) -> str:
        text, num = b"", 0
        while num < MAX_FORCED_TOKENS and not self._compiled.is_complete(self._guide):
            shortest, shared = self._shared_start()
            text += shared
            if shortest is None or not self.accept(shortest):
                break
            num += 1
        self.rollback(num)
        try:
            return text.decode()
        except UnicodeDecodeError as error:  # the text starts or ends within a character
            return text[: error.start].decode()

    def _shared_start(self) -> tuple[int | None, bytes]:
        """Return a token that equals the common prefix of all allowed tokens, or None; and the prefix."""
        allowed = self._allowed()
        texts = [self._tokens.bytes_of[i] for i in allowed[:1].tolist() + allowed[-1:].tolist()]
        if not texts or texts[0][:1] != texts[1][:1]:
            return None, b""  # the most frequent case; comparing two tokens detects it
        by_id = {i: self._tokens.bytes_of[i] for i in allowed.tolist()}
        least, most = min(by_id.values()), max(by_id.values())
        length = next((i for i, byte in enumerate(least) if most[i] != byte), len(least))
        return next((i for i, text in by_id.items() if len(text) == length), None), least[:length]

    def forced_tokens(self) -> list[int]:
        """Return the forced next tokens, at most 64."""
        return find_forced_tokens(self, self._tokens.vocab_size)

    def _allowed(self) -> NDArray[np.intp]:
        row = self._compiled.row(self._guide)
        return np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))

    @property
    def finished(self) -> bool:
        """Whether a stop token was accepted."""
        return self._finished
