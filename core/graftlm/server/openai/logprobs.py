"""Log-probabilities in OpenAI's formats."""

import codecs
from collections.abc import Sequence

from graftlm.server.openai.answers import ChatLogprobs, CompletionTokens, ContentToken, TokenBody
from graftlm.tokenization import Tokenizer
from graftlm.types import TokenLogprob

__all__ = ["CompletionLogprobs", "chat_logprobs", "shown_logprobs"]


def chat_logprobs(tokenizer: Tokenizer, logprobs: Sequence[TokenLogprob]) -> ChatLogprobs:
    """Return the `logprobs` of a chat's choice or of a chunk of it."""
    return ChatLogprobs([_sampled_token(tokenizer, logprob) for logprob in logprobs])


def shown_logprobs(
    logprobs: Sequence[TokenLogprob], matched_stop: str | int | None, *, keeps_stop: bool
) -> Sequence[TokenLogprob]:
    """Return the log-probabilities of the tokens in a chat's answer, without the end token.

    Args:
        logprobs: log-probabilities of the last tokens of a completion that has ended.
        matched_stop: id of the end token, if a token ended the completion.
        keeps_stop: whether the text includes the end token.
    """
    return logprobs[:-1] if isinstance(matched_stop, int) and not keeps_stop else logprobs


def _sampled_token(tokenizer: Tokenizer, logprob: TokenLogprob) -> ContentToken:
    data = tokenizer.token_bytes(logprob.token_id)
    top = [_top_token(tokenizer, token_id, value) for token_id, value in logprob.top]
    return ContentToken(data.decode(errors="replace"), logprob.logprob, list(data), top)


def _top_token(tokenizer: Tokenizer, token_id: int, logprob: float) -> TokenBody:
    data = tokenizer.token_bytes(token_id)
    return TokenBody(data.decode(errors="replace"), logprob, list(data))


class CompletionLogprobs:
    """Writes the `logprobs` of one completion's choice, in one or several parts.

    It stores the length of the text so far, because the offsets of the next tokens depend on this length.
    """

    def __init__(self, tokenizer: Tokenizer, skips_special: bool) -> None:
        """Initialize the writer for a completion without text.

        Args:
            skips_special: whether special tokens are left out of the text.
        """
        self._tokenizer = tokenizer
        self._skips_special = skips_special
        self._offset = 0
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")

    def write(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob | None]) -> CompletionTokens:
        """Return the `logprobs` of the next tokens.

        Args:
            token_ids: the tokens that follow the tokens of the last call.
            logprobs: one value per token; None for a prompt's first token.
        """
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
        """Return text -> log-probability of the most likely tokens. The sampled token is always included."""
        top = {self._text(token_id): value for token_id, value in reversed(logprob.top)}
        return top | {self._text(logprob.token_id): logprob.logprob} if logprob.top else {}

    def _text(self, token_id: int) -> str:
        r"""Return a token as text. A part of a character is written in OpenAI's notation, such as `bytes:\xe2\x82`."""
        data = self._tokenizer.token_bytes(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
