"""Incremental decoding: token ids in, new text out."""

from collections.abc import Iterable, Sequence
from typing import Final, Protocol

__all__ = ["Detokenizer", "TokenDecoder"]

#: What a decoder shows for bytes that form no character, or none yet.
_REPLACEMENT: Final = "\ufffd"

#: Tokens that may wait for the rest of a character. A character has at most four bytes, so what is still open after
#: this many tokens is no unfinished character but bytes that form none.
_MAX_PENDING: Final = 8


class TokenDecoder(Protocol):
    """The part of a tokenizer that incremental decoding needs."""

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of token ids."""
        ...

    def is_special(self, token_id: int) -> bool:
        """Whether `skip_special_tokens` leaves this token out."""
        ...

    def is_known(self, token_id: int) -> bool:
        """Whether the vocabulary holds this id."""
        ...


class Detokenizer:
    """The text of one growing token sequence. Each token costs two decodes of a few tokens, however long the text.

    What one token adds depends on its neighbours: a character may span tokens, and a decoder may drop the space before
    a first word. So the tokens that the latest text came from are decoded again together with what follows, and the
    text given before is taken off the front:

        tokens   | forgotten |  context  |  pending  |
        text     |  given before         |  given once it ends in a whole character, not in U+FFFD
                             |<--     window      -->|

    The pieces join to the decoding of the whole sequence, for every decoder in which a later token can only change a
    trailing U+FFFD: byte-level ones above all. A byte-fallback decoder turns a whole run of byte tokens into U+FFFD
    when the run ends up invalid. Characters of the run that were already given then stay: text is never taken back.

    This is done here and not by `tokenizers.decoders.DecodeStream`, because a stream of that class that has met such a
    run raises an error for every later token, and because it keeps all tokens since the last whole character: output
    that goes on ending in U+FFFD, or in skipped special tokens, takes quadratic time.
    """

    def __init__(self, tokenizer: TokenDecoder, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special_tokens
        self._window: list[int] = []
        self._num_context = 0
        self._given = ""  # the part of the window's text that was returned

    def push(self, token_ids: Iterable[int]) -> str:
        """Add tokens and return the text they complete, possibly ""."""
        return "".join([self._step(int(token_id)) for token_id in token_ids if self._shows(int(token_id))])

    def jump(self, token_ids: Sequence[int], text: str) -> str:
        """Go on with tokens that replace the latest ones and say more by `text`, which is returned.

        Nothing is held back before or after: both end in whole characters.
        """
        latest = [int(token_id) for token_id in token_ids][-_MAX_PENDING:]
        windows = (latest[start:] for start in range(len(latest)))
        self._window = next((w for w in windows if _REPLACEMENT not in self._decode(w)), latest)
        self._given = self._decode(self._window)
        self._num_context = len(self._window)
        return text

    def finish(self) -> str:
        """Return what is still held back, with U+FFFD for an unfinished character. Push nothing afterwards."""
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
        # Of bytes that form no character only the last may still become one.
        return self._slide(self._new_text(text)[:-1], num_keep=_MAX_PENDING, num_held=1)

    def _new_text(self, text: str) -> str:
        if text.startswith(self._given):
            return text[len(self._given) :]
        return self._decode(self._window[self._num_context :])  # the decoder took back what was given

    def _slide(self, new_text: str, num_keep: int, num_held: int) -> str:
        """Forget all but the last tokens, of whose text all but the last characters has been given."""
        self._window = self._window[-num_keep:]
        text = self._decode(self._window)
        self._given = text[: len(text) - num_held]
        self._num_context = len(self._window) - num_held
        return new_text
