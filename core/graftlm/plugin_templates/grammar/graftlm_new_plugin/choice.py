"""The grammar backend, which restricts the output to one of a list of texts and refuses other specifications."""

import json
from collections.abc import Sequence

import numpy as np
from graftlm.contracts import CompiledGrammar, GrammarBackend, GrammarContext, GrammarKind, GrammarMatcher, GrammarSpec
from graftlm.errors import GrammarError
from numpy.typing import NDArray

from graftlm_new_plugin.options import ChoiceOptions
from graftlm_new_plugin.vocabulary import Vocabulary

__all__ = ["ChoiceBackend"]


class ChoiceBackend(GrammarBackend):
    """A grammar backend that supports only `GrammarKind.CHOICE`."""

    def __init__(self, options: ChoiceOptions, context: GrammarContext) -> None:
        self._max_texts = options.max_texts
        self._vocabulary = Vocabulary(context)

    def check(self, spec: GrammarSpec) -> tuple[str, ...]:
        """Refuse a specification that is not a JSON list of texts.

        Raises:
            GrammarError: the specification is of another kind, malformed, or has too many texts.
        """
        self._texts(spec)
        return ()

    def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        """Compile a choice between the texts.

        Raises:
            GrammarError: the same as for `check`.
        """
        return _Choice(self._texts(spec), self._vocabulary)

    def _texts(self, spec: GrammarSpec) -> list[bytes]:
        if spec.kind is not GrammarKind.CHOICE:
            raise GrammarError(f"new-plugin supports only {GrammarKind.CHOICE.value}, got {spec.kind.value}")
        try:
            texts = json.loads(spec.text)
            if isinstance(texts, list) and texts and all(isinstance(text, str) for text in texts):
                encoded = [text.encode() for text in dict.fromkeys(texts)]
            else:
                raise GrammarError("choice: expected a JSON list of at least one text")
        except (ValueError, RecursionError) as error:  # the text is not JSON, or has an unpaired surrogate
            raise GrammarError(f"choice: expected a JSON list of texts: {error}") from error
        if len(encoded) > self._max_texts:
            raise GrammarError(
                f"choice: got {len(encoded)} texts, expected at most {self._max_texts} (grammar.options.max_texts)"
            )
        return encoded


class _Choice(CompiledGrammar):
    def __init__(self, texts: Sequence[bytes], vocabulary: Vocabulary) -> None:
        self._texts = texts
        self._vocabulary = vocabulary

    def matcher(self) -> GrammarMatcher:
        """Return a matcher in the start state, in which every text of the list is possible."""
        return _ChoiceMatcher(self._texts, self._vocabulary)


class _ChoiceMatcher(GrammarMatcher):
    """A matcher. Its history has the remaining parts of the possible texts after each token; None after the end."""

    def __init__(self, texts: Sequence[bytes], vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._history: list[Sequence[bytes] | None] = [texts]

    def accept(self, token_id: int) -> bool:
        """Accept a token if it is allowed. Return whether it was; if not, the matcher does not change."""
        rests = self._history[-1]
        if rests is None:
            return False
        if token_id in self._vocabulary.stop_token_ids:
            if b"" not in rests:
                return False
            self._history.append(None)
            return True
        token = self._vocabulary.bytes_of(token_id)
        left = [rest[len(token) :] for rest in rests if token and rest.startswith(token)]
        if left:
            self._history.append(left)
        return bool(left)

    def rollback(self, num_tokens: int) -> None:
        """Undo the last `num_tokens` accepted tokens."""
        del self._history[len(self._history) - num_tokens :]

    def fill_bitmask(self, mask: NDArray[np.int32], row: int) -> None:
        """Write the allowed tokens into mask[row]."""
        bits = np.zeros(mask.shape[1] * 32, dtype=np.uint8)
        bits[sorted(self._allowed())] = 1
        mask[row] = np.packbits(bits, bitorder="little").view("<i4")

    def forced_text(self) -> str:
        """Return the common continuation of all possible texts; "" if the accepted bytes end within a character."""
        rests = sorted(self._history[-1] or [b""])
        common = _common(rests[0], rests[-1])  # the texts are sorted, so all have this prefix
        is_inside = common[:1] != b"" and 0x80 <= common[0] < 0xC0
        return "" if is_inside else common.decode(errors="ignore")

    def forced_tokens(self) -> Sequence[int]:
        """Return the next tokens, up to the first position where more than one token is allowed."""
        ahead = _ChoiceMatcher([], self._vocabulary)
        ahead._history = [self._history[-1]]
        forced: list[int] = []
        while len(allowed := ahead._allowed()) == 1:
            forced += allowed
            ahead.accept(forced[-1])
        return forced

    @property
    def finished(self) -> bool:
        """Whether a stop token was accepted."""
        return self._history[-1] is None

    def _allowed(self) -> set[int]:
        rests = self._history[-1] or ()
        allowed = {token_id for rest in rests for token_id in self._vocabulary.prefixes_of(rest)}
        return allowed.union(self._vocabulary.stop_token_ids) if b"" in rests else allowed


def _common(one: bytes, other: bytes) -> bytes:
    length = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    return one[:length]
