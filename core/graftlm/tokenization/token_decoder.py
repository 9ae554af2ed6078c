"""Converts token ids to text with only the `tokenizers` library."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from graftlm.types import TokenIds

if TYPE_CHECKING:
    import tokenizers

__all__ = ["RustTokenDecoder"]


class RustTokenDecoder:
    """Decodes like the original tokenizer, without its checkpoint and without Transformers."""

    def __init__(self, core: tokenizers.Tokenizer) -> None:
        self._core = core
        self._special_ids = frozenset(i for i, token in core.get_added_tokens_decoder().items() if token.special)

    @classmethod
    def from_json(cls, text: str) -> RustTokenDecoder:
        """Create a decoder from the result of `Tokenizer.to_json`."""
        import tokenizers

        return cls(tokenizers.Tokenizer.from_str(text))

    def decode(self, token_ids: Sequence[int] | TokenIds, skip_special_tokens: bool = True) -> str:
        """Return the text of token ids; invalid bytes become U+FFFD, unknown ids and placeholder ids become ""."""
        ids = token_ids.tolist() if isinstance(token_ids, np.ndarray) else list(token_ids)
        try:
            return self._core.decode(ids, skip_special_tokens=skip_special_tokens)
        except OverflowError:  # the ids of pictures are below 0
            return self._core.decode([i for i in ids if i >= 0], skip_special_tokens=skip_special_tokens)

    def is_special(self, token_id: int) -> bool:
        """Return whether `skip_special_tokens` skips this token."""
        return token_id in self._special_ids

    def is_known(self, token_id: int) -> bool:
        """Return whether the vocabulary contains this id; a model's logits may have more columns."""
        return self._core.id_to_token(token_id) is not None
