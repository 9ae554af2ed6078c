"""Drafts the output that a grammar forces (exact jump-forward).

A grammar forces characters, and a model chooses tokens that spell them. The tokenizer's tokens for the forced text are
drafted. A step verifies them under the grammar's masks, so the output has the model's choices, with log-probabilities.
The forced text costs one step instead of one step per token.
"""

from typing import Final, Protocol

import numpy as np

from graftlm.errors import RequestError
from graftlm.scheduling.request import Request
from graftlm.speculation import SourcedDraft
from graftlm.types import TokenIds

__all__ = ["FORCED", "Encoder", "ForcedDrafts"]

#: The source of these drafts in counts and metrics.
FORCED: Final = "grammar"

_MAX_CHARS: Final = 256
_CONFIDENCE: Final = 0.9
_MAX_CACHED: Final = 4096


class Encoder(Protocol):
    """The methods of a tokenizer that are needed."""

    def encode_inside(self, text: str) -> list[int]:
        """Return the tokens of a text that is part of a longer text."""
        ...


class ForcedDrafts:
    """Drafts the tokens that requests' grammars force next.

    Args:
        tokenizer: encodes forced text. Its results are cached for texts that recur, such as keys of JSON objects.
    """

    def __init__(self, tokenizer: Encoder) -> None:
        self._tokenizer = tokenizer
        self._cached: dict[str, TokenIds] = {}

    def of(self, request: Request) -> SourcedDraft | None:
        """Return the tokens of the text that must come next; None if there is a choice, or jump-forward is off."""
        grammar = request.grammar
        if grammar is None or request.params.jump_forward is False:
            return None
        try:
            text = grammar.forced_text()[:_MAX_CHARS]
        except RequestError:
            return None  # if the error recurs, the next mask reports it
        token_ids = self._tokens(text) if text else None
        return None if token_ids is None or not len(token_ids) else SourcedDraft(FORCED, token_ids, _CONFIDENCE)

    def _tokens(self, text: str) -> TokenIds:
        found = self._cached.get(text)
        if found is None:
            if len(self._cached) == _MAX_CACHED:
                self._cached.clear()
            found = self._cached[text] = np.array(self._tokenizer.encode_inside(text), dtype=np.int32)
        return found
