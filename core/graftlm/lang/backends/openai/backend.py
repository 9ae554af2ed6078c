"""The backend for an OpenAI-compatible endpoint."""

import re
from collections.abc import Sequence
from typing import Final
from urllib.parse import urlsplit

from graftlm.errors import ConfigError, RequestError, UnsupportedFeatureError
from graftlm.lang.backends.http import HttpClient
from graftlm.lang.backends.openai.api_backend import ApiBackend
from graftlm.lang.backends.openai.choices import TokenNumbers, echoed_scores
from graftlm.lang.backends.openai.dialects import (
    CHAT_TEXT_FORMAT,
    ChatDialect,
    ChatFeatures,
    CompletionDialect,
    Dialect,
)
from graftlm.lang.backends.openai.fields import choices_of
from graftlm.lang.chat_template import ChatTemplate, check_template_name, find_template
from graftlm.lang.choices import ChoiceScore
from graftlm.types import Message

__all__ = ["OpenAI"]

_OPENAI: Final = "https://api.openai.com/v1"

#: Part of the names of models that complete text. All other models use the chat endpoint.
_COMPLETION_MODELS: Final = re.compile(r"instruct|davinci|babbage|-base\b", re.IGNORECASE)


class OpenAI(ApiBackend):
    """Runs a program's requests on an endpoint with OpenAI's API.

        set_default_backend(OpenAI("gpt-4o-mini", api_key=...))
        set_default_backend(OpenAI("llama", base_url="http://127.0.0.1:8000/v1", is_chat=False))

    Args:
        model: the model's name at the endpoint.
        base_url: URL before `/chat/completions` and `/completions`.
        api_key: sent with each request; the environment is not read.
        is_chat: whether to use `/chat/completions`; None: yes, unless the model's name is that of a completion model.
        is_chat_model: SGLang's name of `is_chat`.
        chat_template: for `/completions`: name of one of `CHAT_TEMPLATES`; needed if none matches the model's name.
        continue_final_message: whether the chat endpoint can continue a partial message, as graftlm, SGLang and vLLM
            can.
        max_requests: maximum number of active requests; further requests wait.
        timeout_s: a request is aborted after this number of seconds without a byte from the endpoint; None: no limit.

    Raises:
        ConfigError: an argument is invalid.
    """

    def __init__(
        self,
        model: str,
        *,
        base_url: str = _OPENAI,
        api_key: str | None = None,
        is_chat: bool | None = None,
        is_chat_model: bool | None = None,
        chat_template: str | None = None,
        continue_final_message: bool = False,
        max_requests: int = 64,
        timeout_s: float | None = 600.0,
    ) -> None:
        if not isinstance(model, str) or not model:
            raise ConfigError(f"model must be the name of a model at the endpoint, got {model!r}")
        check_template_name(chat_template)
        self._model = model
        self._template_name = chat_template
        self._http = HttpClient(base_url, api_key=api_key, timeout_s=timeout_s, hint=_hint(base_url))
        self._echoes = True
        chats = is_chat_model if is_chat is None else is_chat
        self._is_chat = _COMPLETION_MODELS.search(model) is None if chats is None else chats
        self._completions = CompletionDialect(model)
        dialect: Dialect = self._completions
        if self._is_chat:
            template = find_template(CHAT_TEXT_FORMAT, model)
            limit = "max_completion_tokens" if urlsplit(base_url).hostname == "api.openai.com" else "max_tokens"
            features = ChatFeatures(continues=continue_final_message, limit_name=limit)
            dialect = ChatDialect(model, template, features)
        super().__init__(self._http, dialect, max_requests=max_requests, continues_text=True)

    @property
    def is_chat(self) -> bool:
        """Whether the backend uses `/chat/completions`."""
        return self._is_chat

    @property
    def is_chat_model(self) -> bool:
        """SGLang's name of `is_chat`."""
        return self._is_chat

    async def score(
        self, prompt: str, choices: Sequence[str], *, unconditional: bool, messages: Sequence[Message] = ()
    ) -> list[ChoiceScore]:
        """Return the log-probabilities of each choice; see Backend.

        If the endpoint echoes prompts with their log-probabilities, the result has all tokens of each choice. Other
        endpoints, and chat endpoints, generate one answer at temperature 0 with the most likely tokens at each
        position; the result then has those first tokens of each choice that the endpoint reported.
        """
        if unconditional:
            raise UnsupportedFeatureError(
                "unconditional_likelihood_normalized: an endpoint cannot score tokens without their prompt; use "
                "another choices_method"
            )
        if self._is_chat or not self._echoes:
            return await self._calls.path_scores(self._dialect, prompt, choices, messages)
        scores = await self._echoed_scores(prompt, choices)
        if scores is None:
            scores = await self._calls.path_scores(self._dialect, prompt, choices, messages)
            self._echoes = False  # the answer shows that the prompt is valid, so the endpoint does not support the echo
        return scores

    async def chat_template(self) -> ChatTemplate:
        """Return the format of chats in the program's text; see Backend."""
        return find_template(CHAT_TEXT_FORMAT if self._is_chat else self._template_name, self._model)

    def close(self) -> None:
        """Close the connections; active requests fail. May be called twice."""
        self._http.close()

    async def _echoed_scores(self, prompt: str, choices: Sequence[str]) -> list[ChoiceScore] | None:
        """Return the scores; None if the endpoint does not echo log-probabilities."""
        texts = [prompt, *[prompt + choice for choice in choices]]
        try:
            answer = await self._calls.post(self._completions.path, self._completions.scoring_body(texts))
        except RequestError as error:
            # Other errors (a full queue, a failure) do not show that the endpoint lacks the feature.
            if type(error) not in (RequestError, UnsupportedFeatureError):
                raise
            return None
        echoes = [choice.get("logprobs") for choice in choices_of(answer)]
        return echoed_scores(prompt, choices, echoes, TokenNumbers()) if len(echoes) == len(texts) else None


def _hint(base_url: str) -> str:
    return "" if str(base_url).rstrip("/").endswith("/v1") else "for most endpoints, base_url ends in /v1"
