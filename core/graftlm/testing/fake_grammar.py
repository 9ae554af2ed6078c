"""A grammar backend for a small language: one letter of each word, and no letter twice in a row."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from graftlm.contracts import CompiledGrammar, GrammarBackend, GrammarContext, GrammarKind, GrammarMatcher, GrammarSpec
from graftlm.errors import GrammarError

__all__ = ["FakeGrammarBackend"]


class FakeGrammarBackend(GrammarBackend):
    """A grammar backend that reads an EBNF text as words: "ab bc" allows the texts ab, ac and bc, but not bb.

    The allowed tokens depend on position and previous token, so tests detect a mask for the wrong position.

    Args:
        texts: text of each token. A token that is not a single letter is never allowed.
        vocab_size: V.
        stop_token_ids: tokens that end a complete text.
    """

    def __init__(self, texts: Sequence[str], vocab_size: int, stop_token_ids: Sequence[int]) -> None:
        self.texts = list(texts)
        self.vocab_size = vocab_size
        self.stop_token_ids = tuple(stop_token_ids)

    @classmethod
    def of(cls, context: GrammarContext) -> "FakeGrammarBackend":
        """Create the backend from an engine's context."""
        import tokenizers

        core = tokenizers.Tokenizer.from_str(context.tokenizer_json)
        texts = [core.id_to_token(i) or "" for i in range(context.vocab_size)]
        return cls(texts, context.vocab_size, context.stop_token_ids)

    def check(self, spec: GrammarSpec) -> tuple[str, ...]:
        """Check that a specification is EBNF and consists of words; return an empty tuple.

        Raises:
            GrammarError: the specification is something else.
        """
        if spec.kind is not GrammarKind.EBNF:
            raise GrammarError(f"{spec.kind.value}: this backend supports only ebnf")
        if not spec.text.replace(" ", "").isalpha():
            raise GrammarError(f"ebnf: expected words, got {spec.text!r}")
        return ()

    def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        """Compile a specification; see `GrammarBackend.compile`."""
        self.check(spec)
        return _FakeCompiled(self, spec.text.split())


class _FakeCompiled(CompiledGrammar):
    def __init__(self, backend: FakeGrammarBackend, words: list[str]) -> None:
        self._backend = backend
        self._words = words

    def matcher(self) -> GrammarMatcher:
        """Return a new matcher in the start state."""
        return _FakeMatcher(self._backend, self._words)


class _FakeMatcher(GrammarMatcher):
    def __init__(self, backend: FakeGrammarBackend, words: list[str]) -> None:
        self._backend = backend
        self._words = words
        self._tokens: list[int] = []

    def accept(self, token_id: int) -> bool:
        """Accept a token if it is allowed. Return whether it was; if not, the matcher does not change."""
        if token_id not in self._allowed():
            return False
        self._tokens.append(token_id)
        return True

    def rollback(self, num_tokens: int) -> None:
        """Undo the last `num_tokens` accepted tokens."""
        del self._tokens[len(self._tokens) - num_tokens :]

    def fill_bitmask(self, mask: NDArray[np.int32], row: int) -> None:
        """Write the allowed tokens into mask[row], int32 [ceil(V / 32)]."""
        bits = np.zeros(mask.shape[1] * 32, dtype=np.uint8)
        bits[self._allowed()] = 1
        mask[row] = np.packbits(bits, bitorder="little").view(np.int32)

    def forced_text(self) -> str:
        """Return the text with which every allowed output continues."""
        return "".join(self._backend.texts[t] for t in self.forced_tokens() if t not in self._backend.stop_token_ids)

    def forced_tokens(self) -> Sequence[int]:
        """Return the next tokens, up to the first position where more than one token is allowed."""
        ahead = _FakeMatcher(self._backend, self._words)
        ahead._tokens = list(self._tokens)
        while len(allowed := ahead._allowed()) == 1:
            ahead.accept(allowed[0])
        return ahead._tokens[len(self._tokens) :]

    @property
    def finished(self) -> bool:
        """Whether a stop token was accepted."""
        return len(self._tokens) > len(self._words)

    def _allowed(self) -> list[int]:
        position = len(self._tokens)
        if position >= len(self._words):
            return list(self._backend.stop_token_ids) if position == len(self._words) else []
        before = self._backend.texts[self._tokens[-1]] if position else ""
        letters = set(self._words[position]) - {before}
        return [token_id for token_id, text in enumerate(self._backend.texts) if text in letters]
