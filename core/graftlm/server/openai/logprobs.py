"""Log-probabilities as OpenAI writes them."""

import codecs
from collections.abc import Sequence

from graftlm.server.openai.answers import ChatLogprobs, CompletionTokens, ContentToken, TokenBody
from graftlm.tokenization import Tokenizer
from graftlm.types import TokenLogprob

__all__ = ["CompletionLogprobs", "chat_logprobs"]


def chat_logprobs(tokenizer: Tokenizer, logprobs: Sequence[TokenLogprob]) -> ChatLogprobs:
    """Return the `logprobs` of a chat's choice or of a chunk of it."""
    return ChatLogprobs([_sampled(tokenizer, logprob) for logprob in logprobs])


def _sampled(tokenizer: Tokenizer, logprob: TokenLogprob) -> ContentToken:
    data = tokenizer.token_bytes(logprob.token_id)
    top = [_rival(tokenizer, token_id, value) for token_id, value in logprob.top]
    return ContentToken(data.decode(errors="replace"), logprob.logprob, list(data), top)


def _rival(tokenizer: Tokenizer, token_id: int, logprob: float) -> TokenBody:
    data = tokenizer.token_bytes(token_id)
    return TokenBody(data.decode(errors="replace"), logprob, list(data))


class CompletionLogprobs:
    """Writes the `logprobs` of one completion's choice, piece by piece: a token's offset depends on those before."""

    def __init__(self, tokenizer: Tokenizer, skips_special: bool) -> None:
        """Begin at the start of a text.

        Args:
            skips_special: special tokens are not part of the text.
        """
        self._tokenizer = tokenizer
        self._skips_special = skips_special
        self._offset = 0
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")

    def write(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob | None]) -> CompletionTokens:
        """Return those of further tokens; a prompt's first token has none."""
        offsets = []
        for token_id in token_ids:
            offsets.append(self._offset)
            if not (self._skips_special and self._tokenizer.is_special(token_id)):
                self._offset += len(self._characters.decode(self._tokenizer.token_bytes(token_id)))
        return CompletionTokens(
            tokens=[self._text(token_id) for token_id in token_ids],
            token_logprobs=[None if logprob is None else logprob.logprob for logprob in logprobs],
            top_logprobs=[None if logprob is None else self._top(logprob) for logprob in logprobs],
            text_offset=offsets,
        )

    def _top(self, logprob: TokenLogprob) -> dict[str, float]:
        """Return the rivals by text; the sampled token is among them, whatever its rank."""
        rivals = {self._text(token_id): value for token_id, value in reversed(logprob.top)}
        return rivals | {self._text(logprob.token_id): logprob.logprob} if logprob.top else {}

    def _text(self, token_id: int) -> str:
        """Return a token as text, or in OpenAI's notation for a part of a character: its bytes in hexadecimal."""
        data = self._tokenizer.token_bytes(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
