"""Drafts the output that a grammar forces (exact jump-forward).

A grammar forces characters, but several token sequences may spell them. The tokenizer's tokens for the forced text are
drafted. A step verifies the drafts under the grammar's masks. The model therefore chooses every token, and
log-probabilities are available. Forced text of up to `speculation.max_drafts` tokens costs one step instead of one step
per token.
"""

import logging
from typing import Final, Protocol

import numpy as np

from graftlm.errors import RequestError
from graftlm.scheduling.request import Request
from graftlm.speculation import SourcedDraft
from graftlm.types import TokenIds

__all__ = ["FORCED", "Encoder", "ForcedDrafts"]

#: Name of the source of these drafts in counts and metrics.
FORCED: Final = "grammar"

_logger = logging.getLogger(__name__)

_MAX_CHARS: Final = 256
_CONFIDENCE: Final = 0.9
_MAX_CACHED: Final = 4096
_NO_TOKENS: Final[TokenIds] = np.empty(0, dtype=np.int32)


class Encoder(Protocol):
    """The method of a tokenizer that `ForcedDrafts` calls."""

    def encode_inside(self, text: str) -> list[int]:
        """Return the tokens of a text that is part of a longer text."""
        ...


class ForcedDrafts:
    """Drafts the tokens that requests' grammars force next.

    Args:
        tokenizer: encodes forced text. The tokens are cached, because texts such as keys of JSON objects recur.
    """

    def __init__(self, tokenizer: Encoder) -> None:
        self._tokenizer = tokenizer
        self._cached: dict[str, TokenIds] = {}

    def of(self, request: Request) -> SourcedDraft | None:
        """Return the tokens of the text that the request's grammar forces next.

        None if the grammar forces no text, the request has jump-forward or speculation disabled, or the tokenizer
        fails.
        """
        grammar, params = request.grammar, request.params
        if grammar is None or params.jump_forward is False or params.speculation is False:
            return None
        try:
            text = grammar.forced_text()[:_MAX_CHARS]
        except RequestError:
            return None  # if the error occurs again when the next mask is filled, it is reported there
        token_ids = self._tokens(text) if text else _NO_TOKENS
        return SourcedDraft(FORCED, token_ids, _CONFIDENCE) if len(token_ids) else None

    def _tokens(self, text: str) -> TokenIds:
        found = self._cached.get(text)
        if found is None:
            if len(self._cached) == _MAX_CACHED:
                self._cached.clear()
            found = self._cached[text] = self._encode(text)
        return found

    def _encode(self, text: str) -> TokenIds:
        try:
            return np.array(self._tokenizer.encode_inside(text), dtype=np.int32)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic of the tokenizer is not an Exception
            _logger.warning("forced text is not drafted, the tokenizer failed: %s: %s", type(error).__name__, error)
            return _NO_TOKENS
