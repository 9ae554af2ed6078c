"""Drafts of output that a grammar forces: exact jump-forward.

A grammar forces characters, and a model chooses tokens that spell them. The tokens that the tokenizer gives for the
forced text are drafted. A step verifies them under the grammar's masks, so the output is what the model chooses, with
log-probabilities, and the forced text costs one step in place of one per token.
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
    """The part of a tokenizer that is needed."""

    def encode_inside(self, text: str) -> list[int]:
        """Return the tokens of a text that stands within another."""
        ...


class ForcedDrafts:
    """Drafts what the grammars of requests force next.

    Args:
        tokenizer: its tokens of a text are kept for texts that recur, as keys of JSON objects do.
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
            return None  # the next mask reports it, if it recurs
        token_ids = self._tokens(text) if text else None
        return None if token_ids is None or not len(token_ids) else SourcedDraft(FORCED, token_ids, _CONFIDENCE)

    def _tokens(self, text: str) -> TokenIds:
        found = self._cached.get(text)
        if found is None:
            if len(self._cached) == _MAX_CACHED:
                self._cached.clear()
            found = self._cached[text] = np.array(self._tokenizer.encode_inside(text), dtype=np.int32)
        return found
