"""Log-probabilities as OpenAI writes them."""

import codecs
from collections.abc import Sequence
from typing import Any

from graftlm.tokenization import Tokenizer
from graftlm.types import TokenLogprob

__all__ = ["CompletionLogprobs", "chat_logprobs"]


def chat_logprobs(tokenizer: Tokenizer, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
    """Return the `logprobs` of a chat's choice or of a chunk of it."""
    return {"content": [_chat_entry(tokenizer, logprob) for logprob in logprobs], "refusal": None}


def _chat_entry(tokenizer: Tokenizer, logprob: TokenLogprob) -> dict[str, Any]:
    top = [_token(tokenizer, token_id, value) for token_id, value in logprob.top]
    return _token(tokenizer, logprob.token_id, logprob.logprob) | {"top_logprobs": top}


def _token(tokenizer: Tokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    data = tokenizer.token_bytes(token_id)
    return {"token": data.decode(errors="replace"), "logprob": logprob, "bytes": list(data)}


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

    def write(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob | None]) -> dict[str, Any]:
        """Return those of further tokens; a prompt's first token has none."""
        offsets = []
        for token_id in token_ids:
            offsets.append(self._offset)
            if not (self._skips_special and self._tokenizer.is_special(token_id)):
                self._offset += len(self._characters.decode(self._tokenizer.token_bytes(token_id)))
        return {
            "tokens": [self._text(token_id) for token_id in token_ids],
            "token_logprobs": [None if logprob is None else logprob.logprob for logprob in logprobs],
            "top_logprobs": [None if logprob is None else self._top(logprob) for logprob in logprobs],
            "text_offset": offsets,
        }

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
