"""Programs on an endpoint that speaks OpenAI's HTTP API."""

import re
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any, Final, Self
from urllib.parse import urlsplit

from graftlm.errors import ConfigError, RequestError, UnavailableError, UnsupportedFeatureError
from graftlm.lang.backend import Backend, Generation, GenerationRequest
from graftlm.lang.backends.http import HttpClient
from graftlm.lang.backends.openai.choices import MAX_PATH_TOKENS, TokenNumbers, echoed_scores, path_scores
from graftlm.lang.backends.openai.dialects import ChatDialect, CompletionDialect, Dialect
from graftlm.lang.backends.openai.fields import DEFAULT_MAX_TOKENS, call_tokens, choices_of
from graftlm.lang.backends.room import Room
from graftlm.lang.backends.speculation import SpeculativeBackend
from graftlm.lang.backends.usage import ApiUsage, UsageMeter
from graftlm.lang.chat_template import ChatTemplate, check_template_name, find_template
from graftlm.lang.choices import ChoiceScore
from graftlm.lang.sampling import Sampling
from graftlm.types import Message

__all__ = ["OpenAI"]

_OPENAI: Final = "https://api.openai.com/v1"

#: Models that complete text; all others chat.
_COMPLETION_MODELS: Final = re.compile(r"instruct|davinci|babbage|-base\b", re.IGNORECASE)

#: How a chat endpoint's programs write chats in their own text, which the endpoint never sees.
_NOTATION: Final = "chatml"


class OpenAI:
    """Runs a program's requests on an endpoint of OpenAI's, or one like it.

        set_default_backend(OpenAI("gpt-4o-mini", api_key=...))
        set_default_backend(OpenAI("llama", base_url="http://127.0.0.1:8000/v1", is_chat=False))

    Args:
        model: its name there.
        base_url: what `/chat/completions` and `/completions` stand behind.
        api_key: sent with each request; nothing is read from the environment.
        is_chat: whether to use `/chat/completions`; None: unless the model's name says that it completes text.
        chat_template: for `/completions`: a name of `CHAT_TEMPLATES`, when the model's name says nothing.
        continue_final_message: the chat endpoint goes on with a message that is there in part, as those of graftlm,
            SGLang and vLLM do.
        max_requests: under way at a time; more wait here.
        timeout_s: without a byte from the endpoint, after which a request is given up; None: never.

    Raises:
        ConfigError: one of them cannot be meant.
    """

    def __init__(
        self,
        model: str,
        *,
        base_url: str = _OPENAI,
        api_key: str | None = None,
        is_chat: bool | None = None,
        chat_template: str | None = None,
        continue_final_message: bool = False,
        max_requests: int = 64,
        timeout_s: float | None = 600.0,
    ) -> None:
        if not isinstance(model, str) or not model:
            raise ConfigError(f"model must be a model's name at the endpoint, got {model!r}")
        check_template_name(chat_template)
        self._model = model
        self._template_name = chat_template
        self._http = HttpClient(base_url, api_key=api_key, timeout_s=timeout_s, hint=_hint(base_url))
        self._room = Room(max_requests)
        self._meter = UsageMeter()
        self._echoes = True
        self._is_chat = _COMPLETION_MODELS.search(model) is None if is_chat is None else is_chat
        self._completions = CompletionDialect(model)
        self._dialect: Dialect = self._completions
        if self._is_chat:
            notation = find_template(_NOTATION, model)
            limit = "max_completion_tokens" if urlsplit(base_url).hostname == "api.openai.com" else "max_tokens"
            self._dialect = ChatDialect(model, notation, continues=continue_final_message, limit_name=limit)

    @property
    def is_chat(self) -> bool:
        """Whether it uses `/chat/completions`."""
        return self._is_chat

    @property
    def usage(self) -> ApiUsage:
        """Calls and tokens so far, and those that speculation saved."""
        return self._meter.usage

    def speculative(self, num_tokens: int) -> Backend:
        """Return one state's view of it, which answers several `gen`s by one call; see SpeculatingBackend."""
        return SpeculativeBackend(
            self,
            num_tokens,
            self._meter,
            default_max_tokens=DEFAULT_MAX_TOKENS,
            writes_whole_messages=self._dialect.writes_whole_messages,
        )

    # -- the protocol --------------------------------------------------------------------------------------------------

    async def generate(self, request: GenerationRequest) -> list[Generation]:
        """Complete a prompt; see Backend."""
        answer = await self._call(self._dialect.path, self._dialect.body(request))
        return self._dialect.generations(request, answer)

    async def stream(self, request: GenerationRequest) -> AsyncGenerator[Generation, None]:
        """Complete a prompt, yielding as it grows; see Backend."""
        body = self._dialect.body(request) | {"stream": True, "stream_options": {"include_usage": True}}
        if self._dialect.written(request):  # nothing is certain before the beginning has been compared
            (whole,) = await self.generate(request)
            yield whole
            return
        growing, generation = self._dialect.growing(), Generation("")
        async with self._room.place():
            event, rest = await self._room.enter(lambda: _started(self._http.events(self._dialect.path, body)))
            async with aclosing(rest):
                generation = self._dialect.grown(request, growing, event)
                yield generation
                async for event in rest:
                    generation = self._dialect.grown(request, growing, event)
                    yield generation
        if generation.meta_info["finish_reason"] is None:
            raise UnavailableError(f"{self._http.url} ended a stream before its text was complete")
        self._meter.count_call(growing.tokens.prompt, growing.tokens.completion)

    async def score(
        self, prompt: str, choices: Sequence[str], *, unconditional: bool, messages: Sequence[Message] = ()
    ) -> list[ChoiceScore]:
        """Return how likely each choice is; see Backend.

        An endpoint that echoes prompts with their log-probabilities tells all of each choice. Of others, and of chat
        endpoints, one answer at temperature 0 is asked, and choices are known as far as they are among the likeliest
        tokens beside it.
        """
        if unconditional:
            raise UnsupportedFeatureError(
                "unconditional_likelihood_normalized: an endpoint cannot score tokens without their prompt; take "
                "another choices_method"
            )
        if self._is_chat or not self._echoes:
            return await self._path_scores(prompt, choices, messages)
        scores = await self._echoed_scores(prompt, choices)
        if scores is None:
            scores = await self._path_scores(prompt, choices, messages)
            self._echoes = False  # it was that which it refused, and not this prompt
        return scores

    async def cache_prefix(self, prompt: str) -> None:
        """Do nothing: what such an endpoint caches is its own to decide, and a call has its price; see Backend."""

    async def chat_template(self) -> ChatTemplate:
        """Return how the program's text writes chats; see Backend."""
        return find_template(_NOTATION if self._is_chat else self._template_name, self._model)

    async def flush_cache(self) -> None:
        """Refuse: such an endpoint has no way to ask for it; see Backend."""
        raise UnsupportedFeatureError("flush_cache: an OpenAI endpoint cannot be told to forget its cache")

    def close(self) -> None:
        """Close its connections; what is under way fails. May be called twice."""
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- calls ---------------------------------------------------------------------------------------------------------

    async def _call(self, path: str, body: dict[str, Any]) -> Any:
        async with self._room.place():
            answer = await self._room.enter(lambda: self._http.json("POST", path, body))
        choices_of(answer)
        tokens = call_tokens(answer)
        self._meter.count_call(tokens.prompt, tokens.completion)
        return answer

    async def _echoed_scores(self, prompt: str, choices: Sequence[str]) -> list[ChoiceScore] | None:
        """Return the scores; None when the endpoint does not echo log-probabilities."""
        texts = [prompt, *[prompt + choice for choice in choices]]
        try:
            answer = await self._call(self._completions.path, self._completions.scoring_body(texts))
        except RequestError as error:
            if type(error) not in (
                RequestError,
                UnsupportedFeatureError,
            ):  # full or failed, which says nothing of what it can do
                raise
            return None
        echoes = [choice.get("logprobs") for choice in choices_of(answer)]
        return echoed_scores(prompt, choices, echoes, TokenNumbers()) if len(echoes) == len(texts) else None

    async def _path_scores(self, prompt: str, choices: Sequence[str], messages: Sequence[Message]) -> list[ChoiceScore]:
        sampling = Sampling(
            max_tokens=min(max(len(choice) for choice in choices), MAX_PATH_TOKENS),
            temperature=0.0,
            return_logprob=True,
            top_logprobs_num=self._dialect.max_top_logprobs,
        )
        (answer,) = await self.generate(GenerationRequest(prompt, sampling, tuple(messages)))
        tokens, top = answer.meta_info["output_token_logprobs"], answer.meta_info["output_top_logprobs"]
        if not tokens or len(top) != len(tokens):
            raise UnsupportedFeatureError(
                "select: this endpoint tells no log-probabilities; let gen write one of the choices instead, and check"
            )
        return path_scores(choices, tokens, top, TokenNumbers())


def _hint(base_url: str) -> str:
    return "" if str(base_url).rstrip("/").endswith("/v1") else "base_url ends in /v1 at most endpoints"


async def _started(
    events: AsyncGenerator[dict[str, Any], None],
) -> tuple[dict[str, Any], AsyncGenerator[dict[str, Any], None]]:
    """Return a stream's first event, which says that the request has been taken, and the rest."""
    try:
        return await anext(events), events
    except StopAsyncIteration:
        raise UnavailableError("the endpoint ended a stream without an event") from None
