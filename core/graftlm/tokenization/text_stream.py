"""Decodes one completion's tokens incrementally, up to a stop string or pattern."""

from collections.abc import Sequence
from dataclasses import dataclass

from graftlm.tokenization.detokenizer import Detokenizer, TokenDecoder
from graftlm.tokenization.stop_strings import StopStrings
from graftlm.types import SamplingParams, TokenIds

__all__ = ["StopStringWatch", "TextStream", "TextUpdate"]


@dataclass(frozen=True, slots=True)
class TextUpdate:
    """The result of a push.

    Attributes:
        text: new text of the completion.
        matched: the stop string or pattern that ended the completion, or None.
        num_tokens: number of pushed tokens that belong to the completion: all tokens, or those up to and including the
            token that completed the match.
    """

    text: str
    matched: str | None
    num_tokens: int


class TextStream:
    """The text of one completion, as returned to users.

    A stop string that is complete before `min_tokens` tokens does not end the completion and remains in the text. Text
    is held back while it ends inside a character or may be the start of a stop string; `finish` returns it. The same
    applies to stop patterns.
    """

    def __init__(self, tokenizer: TokenDecoder, params: SamplingParams) -> None:
        self._detokenizer = Detokenizer(tokenizer, params.skip_special_tokens)
        self._stops = StopStrings(params.stop_strings, params.include_stop, params.stop_patterns)
        self._min_tokens = params.min_tokens
        self._num_tokens = 0
        self._matched: str | None = None

    @property
    def matched(self) -> str | None:
        """The stop string or pattern that ended the completion, or None."""
        return self._matched

    def push(self, token_ids: Sequence[int] | TokenIds) -> TextUpdate:
        """Add tokens. Tokens after a matched stop string do not belong to the completion and are ignored."""
        pieces: list[str] = []
        num_before = self._num_tokens
        for token_id in token_ids:
            if self._matched is not None:
                break
            self._num_tokens += 1
            pieces.append(self._show(self._detokenizer.push((int(token_id),))))
        return TextUpdate("".join(pieces), self._matched, self._num_tokens - num_before)

    def jump(self, num_dropped: int, token_ids: Sequence[int], text: str) -> TextUpdate:
        """Replace the latest `num_dropped` tokens by tokens whose text is longer by `text`."""
        self._num_tokens += len(token_ids) - num_dropped
        return TextUpdate(self._show(self._detokenizer.jump(token_ids, text)), self._matched, len(token_ids))

    def finish(self) -> str:
        """Return the text that was held back, up to a stop string in it. Do not push afterwards."""
        if self._matched is not None:
            return ""
        return self._show(self._detokenizer.finish()) + self._stops.finish()

    def _show(self, text: str) -> str:
        match = self._stops.push(text, armed=self._num_tokens >= self._min_tokens)
        self._matched = match.matched
        return match.text


class StopStringWatch:
    """Finds the token that completes a stop string or pattern. Used by the scheduler, which needs no text."""

    def __init__(self, tokenizer: TokenDecoder, params: SamplingParams) -> None:
        self._stream = TextStream(tokenizer, params)

    def push(self, token_ids: Sequence[int] | TokenIds) -> str | None:
        """Add tokens. Returns: the stop string or pattern that they completed, or None."""
        return self._stream.push(token_ids).matched

    def jump(self, num_dropped: int, token_ids: Sequence[int], text: str) -> str | None:
        """Replace the latest tokens. Returns: the stop string or pattern that `text` completes, or None."""
        return self._stream.jump(num_dropped, token_ids, text).matched

    @property
    def matched(self) -> str | None:
        """The stop string or pattern that ended the completion, or None."""
        return self._stream.matched
