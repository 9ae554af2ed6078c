"""One completion's text: its tokens decoded as they come, up to a stop string."""

from collections.abc import Sequence
from dataclasses import dataclass

from graftlm.tokenization.detokenizer import Detokenizer, TokenDecoder
from graftlm.tokenization.stop_strings import StopStrings
from graftlm.types import SamplingParams, TokenIds

__all__ = ["StopStringWatch", "TextStream", "TextUpdate"]


@dataclass(frozen=True, slots=True)
class TextUpdate:
    """What a push did.

    Attributes:
        text: new text to show.
        matched: the stop string that ended the completion, or None.
        num_tokens: how many of the pushed tokens belong to the completion: all, or those up to and with the one that
            completed the match.
    """

    text: str
    matched: str | None
    num_tokens: int


class TextStream:
    """The text of one completion, as users see it.

    Before `min_tokens` tokens a stop string does not end the completion: one that is complete by then stays in the
    text. Text is held back while it ends within a character or may be the beginning of a stop string; `finish` gives it
    out.
    """

    def __init__(self, tokenizer: TokenDecoder, params: SamplingParams) -> None:
        self._detokenizer = Detokenizer(tokenizer, params.skip_special_tokens)
        self._stops = StopStrings(params.stop_strings, params.include_stop)
        self._min_tokens = params.min_tokens
        self._num_tokens = 0
        self._matched: str | None = None

    @property
    def matched(self) -> str | None:
        """The stop string that ended the completion, or None."""
        return self._matched

    def push(self, token_ids: Sequence[int] | TokenIds) -> TextUpdate:
        """Add tokens. Once a stop string has matched, further tokens are not the completion's: nothing is taken."""
        pieces: list[str] = []
        num_before = self._num_tokens
        for token_id in token_ids:
            if self._matched is not None:
                break
            self._num_tokens += 1
            pieces.append(self._show(self._detokenizer.push((int(token_id),))))
        return TextUpdate("".join(pieces), self._matched, self._num_tokens - num_before)

    def jump(self, num_dropped: int, token_ids: Sequence[int], text: str) -> TextUpdate:
        """Put tokens in the place of the latest ones, which say more by `text` and nothing less."""
        self._num_tokens += len(token_ids) - num_dropped
        return TextUpdate(self._show(self._detokenizer.jump(token_ids, text)), self._matched, len(token_ids))

    def finish(self) -> str:
        """Return the text that was held back, cut where it completes a stop string. Push nothing afterwards."""
        if self._matched is not None:
            return ""
        return self._show(self._detokenizer.finish()) + self._stops.finish()

    def _show(self, text: str) -> str:
        match = self._stops.push(text, armed=self._num_tokens >= self._min_tokens)
        self._matched = match.matched
        return match.text


class StopStringWatch:
    """Tells the scheduler which token completes a stop string; what users see of the text is not its concern."""

    def __init__(self, tokenizer: TokenDecoder, params: SamplingParams) -> None:
        self._stream = TextStream(tokenizer, params)

    def push(self, token_ids: Sequence[int] | TokenIds) -> str | None:
        """Add tokens; return the stop string that they completed, if any."""
        return self._stream.push(token_ids).matched

    def jump(self, num_dropped: int, token_ids: Sequence[int], text: str) -> str | None:
        """Put tokens in the place of the latest ones; return the stop string that `text` completes, if any."""
        return self._stream.jump(num_dropped, token_ids, text).matched

    @property
    def matched(self) -> str | None:
        """The stop string that ended the completion, or None."""
        return self._stream.matched
