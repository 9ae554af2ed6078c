"""Conversion of clients' texts and chats to token ids, with a limit on their length."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from graftlm.errors import InvalidPromptError, PromptTooLongError, UnsupportedFeatureError
from graftlm.media import NO_PICTURES, MediaPrompts, MediaTokens, has_media
from graftlm.prompts import MediaPrompt, Prompt, TextPair, check_chat, is_chat
from graftlm.tokenization import Tokenizer
from graftlm.types import Message, TokenIds

__all__ = ["PromptEncoder"]

T = TypeVar("T")


class PromptEncoder:
    """Tokenizes clients' prompts. All methods may be called from several threads.

    Args:
        context_len: maximum number of tokens in a prompt. A text that has more characters than this number of tokens
            can have is refused before tokenization.
        media: tokenizes prompts with pictures; None: such prompts are refused.
    """

    def __init__(
        self, tokenizer: Tokenizer, vocab_size: int, context_len: int, media: MediaPrompts | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self._media = media
        self._vocab_size = vocab_size
        self._context_len = context_len

    def encode(self, prompt: Prompt | TextPair, template_args: Mapping[str, Any]) -> Any:
        """Return the token ids, int32 [n], of a text, a pair of texts or a chat. Other prompts are returned unchanged.

        A prompt with pictures is returned as `MediaTokens`.

        Args:
            template_args: further variables of the chat template.

        Raises:
            InvalidPromptError: the prompt is empty or not valid Unicode, or the chat template refuses it.
            PromptTooLongError: the prompt has more characters than `context_len` tokens can have.
            MediaError: a picture cannot be used.
            UnsupportedFeatureError: the prompt has pictures, but the model cannot use them.
        """
        if isinstance(prompt, MediaPrompt):
            return self._encode_with_pictures(prompt)
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
        """Return a text's token ids, int32 [n]. Raises the errors of `encode`, but accepts ""."""
        self._check_length(text)
        return _checked(lambda: self._tokenizer.encode(text, add_special_tokens))

    def encode_chat(self, chat: Sequence[Message], template_args: Mapping[str, Any]) -> TokenIds | MediaTokens:
        """Return a chat's token ids, int32 [n], with its pictures if it has any. Raises the errors of `encode`."""
        if self._media is not None:
            media = self._media
            return _checked(lambda: media.encode_chat(chat, template_args, self._check_length))
        if has_media(chat):
            raise UnsupportedFeatureError(NO_PICTURES)
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
        """Return whether a text is exactly one token of the model."""
        token_id = self._tokenizer.token_of(text)
        return token_id is not None and token_id < self._vocab_size

    def _encode_with_pictures(self, prompt: MediaPrompt) -> TokenIds | MediaTokens:
        media, given = self._media, prompt.prompt
        if media is None:
            raise UnsupportedFeatureError(NO_PICTURES)
        if not isinstance(given, str):
            return media.encode_ids(given, prompt.images)
        self._check_length(given)
        return _checked(lambda: media.encode_text(given, prompt.images))

    def _encode_pair(self, pair: TextPair) -> TokenIds:
        self._check_length(pair.first + pair.second)
        return _checked(lambda: self._tokenizer.encode_pair(pair.first, pair.second))

    def _check_length(self, text: str) -> None:
        """Refuse a text that is too long for `context_len` tokens. Tokenizing megabytes of text would take a minute.

        Raises:
            PromptTooLongError: the text is too long.
        """
        most = self._tokenizer.most_characters(self._context_len)
        if most is not None and len(text) > most:
            raise PromptTooLongError(
                f"this model's maximum context length is {self._context_len} tokens, which have at most {most:,} "
                f"characters; the prompt has {len(text):,} characters. Shorten the prompt."
            )


def _checked(encode: Callable[[], T]) -> T:
    """Return the result of a call to the tokenizer.

    Raises:
        InvalidPromptError: the text is not valid Unicode.
    """
    try:
        return encode()
    except (UnicodeError, TypeError) as error:  # the tokenizers library raises TypeError for half a surrogate pair
        message = "the text cannot be encoded: it is not valid Unicode, such as half of a surrogate pair"
        raise InvalidPromptError(message) from error
