"""Incremental detokenization: converts new token ids to new text."""

from collections.abc import Iterable, Sequence
from typing import Final, Protocol

__all__ = ["Detokenizer", "TokenDecoder"]

#: A decoder's output for invalid bytes or an incomplete character.
_REPLACEMENT: Final = "\ufffd"

#: Maximum number of tokens that wait for the rest of a character. A character has at most four bytes, so after this
#: number of tokens the bytes are invalid, not incomplete.
_MAX_PENDING: Final = 8


class TokenDecoder(Protocol):
    """The methods of a tokenizer that incremental detokenization needs."""

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of token ids."""
        ...

    def is_special(self, token_id: int) -> bool:
        """Return whether `skip_special_tokens` skips this token."""
        ...

    def is_known(self, token_id: int) -> bool:
        """Return whether the vocabulary contains this id."""
        ...


class Detokenizer:
    """Decodes one growing token sequence. Each token costs two decodes of a few tokens, for any length of the text.

    The text of a token depends on its neighbours: a character may span tokens, and a decoder may drop the space before
    the first word. Therefore the tokens of the latest text are decoded again together with the next tokens, and the
    text that was returned before is removed from the start:

        tokens   |  dropped  |  context  |  pending  |
        text     |  returned before      |  returned when it ends in a whole character, not in U+FFFD
                             |<--     window      -->|

    The joined pieces equal the decoding of the whole sequence if the decoder has this property: a later token can
    change only a trailing U+FFFD. All byte-level decoders have it. A byte-fallback decoder replaces a whole run of byte
    tokens by U+FFFD if the run is invalid. Characters of the run that were already returned then remain, because
    returned text never changes.

    `tokenizers.decoders.DecodeStream` is not used: after an invalid run it raises an error for every later token. It
    also keeps all tokens since the last whole character, so output that continues to end in U+FFFD or in skipped
    special tokens takes quadratic time.
    """

    def __init__(self, tokenizer: TokenDecoder, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special_tokens
        self._window: list[int] = []
        self._num_context = 0
        self._given = ""  # the part of the window's text that was already returned

    def push(self, token_ids: Iterable[int]) -> str:
        """Add tokens and return the text that they complete, possibly ""."""
        return "".join([self._step(int(token_id)) for token_id in token_ids if self._shows(int(token_id))])

    def jump(self, token_ids: Sequence[int], text: str) -> str:
        """Replace the latest tokens by tokens whose text is longer by `text`. Returns: `text`.

        No text is held back before or after this call: both texts end in whole characters.
        """
        latest = [int(token_id) for token_id in token_ids][-_MAX_PENDING:]
        windows = (latest[start:] for start in range(len(latest)))
        self._window = next((w for w in windows if _REPLACEMENT not in self._decode(w)), latest)
        self._given = self._decode(self._window)
        self._num_context = len(self._window)
        return text

    def finish(self) -> str:
        """Return the text that is held back, with U+FFFD for an incomplete character. Do not push afterwards."""
        return self._new_text(self._decode(self._window))

    def _shows(self, token_id: int) -> bool:
        skipped = self._skip_special and self._tokenizer.is_special(token_id)
        return not skipped and self._tokenizer.is_known(token_id)

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special)

    def _step(self, token_id: int) -> str:
        self._window.append(token_id)
        text = self._decode(self._window)
        num_pending = len(self._window) - self._num_context
        if not text.endswith(_REPLACEMENT):
            return self._slide(self._new_text(text), num_keep=num_pending, num_held=0)
        if num_pending <= _MAX_PENDING:
            return ""
        # The bytes are invalid, except that the last one may still be the start of a character.
        return self._slide(self._new_text(text)[:-1], num_keep=_MAX_PENDING, num_held=1)

    def _new_text(self, text: str) -> str:
        if text.startswith(self._given):
            return text[len(self._given) :]
        return self._decode(self._window[self._num_context :])  # the decoder changed text that was already returned

    def _slide(self, new_text: str, num_keep: int, num_held: int) -> str:
        """Keep only the last `num_keep` tokens in the window, and return `new_text`.

        Args:
            new_text: text that `push` returns.
            num_keep: number of tokens to keep.
            num_held: number of last characters of the kept tokens' text that have not been returned.
        """
        self._window = self._window[-num_keep:]
        text = self._decode(self._window)
        self._given = text[: len(text) - num_held]
        self._num_context = len(self._window) - num_held
        return new_text
