"""What a client sends as token ids: texts and chats, not too long to be tokenised."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from graftlm.errors import InvalidPromptError, PromptTooLongError
from graftlm.prompts import Prompt, TextPair, check_chat, is_chat
from graftlm.tokenization import Tokenizer
from graftlm.types import Message, TokenIds

__all__ = ["PromptEncoder"]

T = TypeVar("T")


class PromptEncoder:
    """Calls the tokenizer on what users sent. All methods may be called from several threads.

    Args:
        context_len: tokens of a prompt at most; a text that must have more is not tokenised.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, context_len: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._context_len = context_len

    def encode(self, prompt: Prompt | TextPair, template_args: Mapping[str, Any]) -> Any:
        """Return the token ids of a text, a pair of texts or a chat, int32 [n]; anything else as it is.

        Raises:
            InvalidPromptError: it is empty, no Unicode, or the chat template refuses it.
            PromptTooLongError: it has more characters than the context could spell.
        """
        if isinstance(prompt, str):
            if not prompt:
                raise InvalidPromptError("the prompt is empty; give some text")
            return self.encode_text(prompt)
        if isinstance(prompt, TextPair):
            return self._encode_pair(prompt)
        if is_chat(prompt):
            return self.encode_chat(check_chat(prompt), template_args)
        return prompt

    def encode_text(self, text: str, add_special_tokens: bool = True) -> TokenIds:
        """Return a text's token ids, int32 [n]; raises as `encode`, but "" is a text."""
        self._check_length(text)
        return _checked(lambda: self._tokenizer.encode(text, add_special_tokens))

    def encode_chat(self, chat: Sequence[Message], template_args: Mapping[str, Any]) -> TokenIds:
        """Return a chat's token ids, int32 [n]; raises as `encode`."""
        text = _checked(lambda: self._tokenizer.apply_chat_template(chat, **template_args))
        return self.encode_text(text, add_special_tokens=False)

    def decode(self, token_ids: TokenIds, skip_special_tokens: bool) -> str:
        """Return the text of token ids, int32 [n].

        Raises:
            InvalidPromptError: an id is outside the vocabulary.
        """
        outside = token_ids[(token_ids < 0) | (token_ids >= self._vocab_size)]
        if len(outside):
            size = self._vocab_size
            raise InvalidPromptError(f"token id {outside[0]} is outside the vocabulary of {size} tokens")
        return self._tokenizer.decode(token_ids, skip_special_tokens)

    def is_token(self, text: str) -> bool:
        """Whether a token of the model is all of a text."""
        token_id = self._tokenizer.token_of(text)
        return token_id is not None and token_id < self._vocab_size

    def _encode_pair(self, pair: TextPair) -> TokenIds:
        self._check_length(pair.first + pair.second)
        return _checked(lambda: self._tokenizer.encode_pair(pair.first, pair.second))

    def _check_length(self, text: str) -> None:
        """Refuse a text that is too long in any case; turning megabytes into tokens takes a minute."""
        most = self._tokenizer.most_characters(self._context_len)
        if most is not None and len(text) > most:
            raise PromptTooLongError(
                f"the prompt has {len(text):,} characters, more than the context of {self._context_len} tokens could "
                f"spell ({most:,}). Shorten the prompt."
            )


def _checked(encode: Callable[[], T]) -> T:
    """Call the tokenizer.

    Raises:
        InvalidPromptError: the text is not valid Unicode.
    """
    try:
        return encode()
    except (UnicodeError, TypeError) as error:  # the library raises TypeError for a lone surrogate
        message = "the text cannot be encoded: it is not valid Unicode, such as half of a surrogate pair"
        raise InvalidPromptError(message) from error
