"""The backend for a graftlm or SGLang server, by its native API."""

import base64
import reprlib
from collections.abc import AsyncGenerator, Coroutine, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Final, Self

from graftlm.errors import (
    ConfigError,
    EngineError,
    RequestError,
    RequestFailedError,
    UnavailableError,
    UnsupportedFeatureError,
)
from graftlm.lang.backend import Generation, GenerationRequest
from graftlm.lang.backends.finished_call import run_unless_in_loop
from graftlm.lang.backends.http import HttpClient
from graftlm.lang.backends.request_limit import RequestLimit
from graftlm.lang.backends.scoring import ScoringBatch
from graftlm.lang.backends.server_events import started
from graftlm.lang.backends.stop_regex import complete_until_match, keeps_matches, stream_until_match
from graftlm.lang.backends.token_answers import cached_tokens_of, prompt_token_ids, scored_logprobs, tokenized
from graftlm.lang.chat_template import ChatTemplate, check_template_name, find_template, jinja_renderer
from graftlm.lang.choices import ChoiceScore
from graftlm.lang.event_loop import wait_in_shared_loop
from graftlm.types import Message

__all__ = ["RuntimeEndpoint"]

#: Field of Sampling -> its name in the body's `sampling_params`, if it differs.
#: The marker of a picture if a server does not report it, such as SGLang's.
_IMAGE_TOKEN: Final = "<image>"
_RENAMED: Final = {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens"}
#: Fields of Sampling that are fields of the body itself.
_TOP_LEVEL: Final = ("return_logprob", "logprob_start_len", "top_logprobs_num", "return_text_in_logprobs")


class RuntimeEndpoint:
    """Runs a program's requests on a server.

        set_default_backend(RuntimeEndpoint("http://127.0.0.1:30000"))

    Args:
        base_url: URL of the server.
        api_key: sent with each request. `flush_cache` and the profile need the server's admin key, unless the server
            runs on this machine without keys.
        verify: file with the certificates of the authorities that may sign the server's certificate; None: the system's
            authorities.
        chat_template_name: SGLang's name of `chat_template`.
        chat_template: name of one of `CHAT_TEMPLATES`; needed if the server does not report its template and no
            template matches the model's name.
        adapter: name of a loaded low-rank adapter, used for all requests; None: no adapter.
        max_requests: maximum number of active requests; further requests wait.
        timeout_s: a request is aborted after this number of seconds without a byte from the server; None: no limit.

    Raises:
        ConfigError: an argument is invalid.
    """

    def __init__(
        self,
        base_url: str,
        api_key: str | None = None,
        verify: str | None = None,
        chat_template_name: str | None = None,
        *,
        chat_template: str | None = None,
        adapter: str | None = None,
        max_requests: int = 512,
        timeout_s: float | None = None,
    ) -> None:
        self._http = HttpClient(base_url, api_key=api_key, timeout_s=timeout_s, hint=_hint(base_url), ca_file=verify)
        self._template_name = chat_template or chat_template_name
        check_template_name(self._template_name)
        self._adapter = {} if adapter is None else {"lora_path": adapter}
        self._limit = RequestLimit(max_requests)
        self._chat_template: ChatTemplate | None = None
        self._tokenizes = True  # until the server refuses /v1/tokenize
        self._has_stop_regex = True  # until the server refuses stop_regex

    # -- the protocol --------------------------------------------------------------------------------------------------

    async def generate(self, request: GenerationRequest) -> list[Generation]:
        """Complete a prompt; see Backend."""
        if not self._supports(request):
            return await complete_until_match(self._stream, request)
        try:
            answers = await self._answers(_body(request), request.sampling.n or 1)
        except RequestError as error:
            self._note_refusal(request, error)
            return await complete_until_match(self._stream, request)
        return [_generation(answer) for answer in answers]

    async def stream(self, request: GenerationRequest) -> AsyncGenerator[Generation, None]:
        """Complete a prompt; yields the growing completion; see Backend."""
        if self._supports(request):
            try:
                async with aclosing(self._stream(request)) as generations:
                    async for generation in generations:
                        yield generation
                return
            except RequestError as error:
                self._note_refusal(request, error)
        async with aclosing(stream_until_match(self._stream, request)) as generations:
            async for generation in generations:
                yield generation

    def _supports(self, request: GenerationRequest) -> bool:
        """Return whether the server may end the text at `stop_regex` itself."""
        return not request.sampling.stop_regex or (self._has_stop_regex and keeps_matches(request.sampling))

    def _note_refusal(self, request: GenerationRequest, error: RequestError) -> None:
        """Record that the server lacks `stop_regex`, if this is why it refused a request; else raise the error."""
        if not request.sampling.stop_regex or "stop_regex" not in str(error):
            raise error
        self._has_stop_regex = False

    async def _stream(self, request: GenerationRequest) -> AsyncGenerator[Generation, None]:
        """Stream a completion as the server sends it."""
        async with self._limit.permit():
            answer, rest = await self._limit.retry(lambda: started(self._events(_body(request) | {"stream": True})))
            async with aclosing(rest):
                generation = _generation(answer)
                yield generation
                async for answer in rest:
                    before, generation = generation.text, _generation(answer)
                    _check_grows(before, generation.text)
                    yield generation
        if generation.meta_info.get("finish_reason") is None:
            raise UnavailableError(f"{self._http.url} ended a stream before its text was complete")

    async def score(
        self, prompt: str, choices: Sequence[str], *, unconditional: bool, messages: Sequence[Message] = ()
    ) -> list[ChoiceScore]:
        """Return the log-probabilities of each choice; see Backend."""
        texts = [prompt, *[prompt + choice for choice in choices]]
        before, *whole = await self._tokenize(texts)
        batch = ScoringBatch.of(choices, before, whole, unconditional)
        firsts = [max(start - 1, 0) for start in batch.starts]  # the first reported token has no log-probability
        options = {"return_logprob": True, "logprob_start_len": firsts, "sampling_params": _PROMPT_ONLY}
        answers = await self._answers({"input_ids": batch.prompts, **options}, len(batch.prompts))
        source, infos = self._source("/generate"), [answer["meta_info"] for answer in answers]
        rows = [
            scored_logprobs(info, len(tokens), start, source)
            for info, tokens, start in zip(infos, batch.prompts, batch.starts, strict=True)
        ]
        return batch.scores(rows, [cached_tokens_of(info, source) for info in infos])

    def cache_prefix(self, prompt: str) -> Coroutine[Any, Any, None]:
        """Compute and cache a prompt; see Backend. A program may call this without await; the call then blocks."""
        return run_unless_in_loop(self._cache_prefix(prompt))

    async def _cache_prefix(self, prompt: str) -> None:
        await self._answers({"text": prompt, "sampling_params": _PROMPT_ONLY}, 1)

    async def chat_template(self) -> ChatTemplate:
        """Return the server's chat template, or one that matches its model's name; see Backend."""
        if self._chat_template is None:
            info = await self._model_info()
            self._chat_template = _template_of(info, self._template_name, self._source("/get_model_info"))
        return self._chat_template

    async def image_marker(self) -> str:
        """Return the marker that the server reports, or that of most models; see PictureBackend."""
        info = await self._model_info()
        marker = info.get("image_token", _IMAGE_TOKEN)
        if not marker:
            raise UnsupportedFeatureError(f"image: the model of {self._http.url} cannot use pictures")
        return str(marker)

    def flush_cache(self) -> Coroutine[Any, Any, None]:
        """Remove cached prefixes; see Backend. A program may call this without await; the call then blocks."""
        return run_unless_in_loop(self._http.call("POST", "/flush_cache"))

    # -- calls of SGLang's programs; they wait -------------------------------------------------------------------------

    def get_model_name(self) -> str:
        """Return the path or name of the server's model."""
        return str(wait_in_shared_loop(self._model_info()).get("model_path", ""))

    def get_server_info(self) -> dict[str, Any]:
        """Return the server's configuration and state.

        Raises:
            GraftlmError: the server refuses, cannot be reached, or has no such page.
        """
        info = wait_in_shared_loop(self._http.find("/server_info", "/get_server_info"))
        if not isinstance(info, dict):
            raise UnsupportedFeatureError(f"{self._http.url} reports no server info")
        return info

    def start_profile(self) -> None:
        """Start a profile of the server's steps."""
        wait_in_shared_loop(self._http.call("POST", "/start_profile"))

    def stop_profile(self) -> None:
        """Stop the profile; the server writes its files."""
        wait_in_shared_loop(self._http.call("POST", "/stop_profile"))

    def request(self, method: str, path: str, body: Mapping[str, Any]) -> Any:
        """Send one request with a JSON body; returns the JSON of the answer.

        Raises:
            GraftlmError: the server refuses, or cannot be reached.
        """
        return wait_in_shared_loop(self._http.json(method, path, body))

    def close(self) -> None:
        """Close the connections; active requests fail. May be called twice."""
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- HTTP ----------------------------------------------------------------------------------------------------------

    async def _answers(self, body: Mapping[str, Any], number: int) -> list[dict[str, Any]]:
        """Call /generate and return its answers. Raises an error if their number is wrong or one of them failed."""
        async with self._limit.permit():
            answers = await self._limit.retry(lambda: self._http.json("POST", "/generate", {**body, **self._adapter}))
        answers = answers if isinstance(answers, list) else [answers]
        for answer in answers:
            _check_ended_well(answer)
        if len(answers) != number:
            raise EngineError(f"the server answered {len(answers)} completions to /generate, expected {number}")
        return answers

    async def _events(self, body: Mapping[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the answers of a streamed call of /generate."""
        async with aclosing(self._http.events("/generate", {**body, **self._adapter})) as events:
            async for event in events:
                _check_ended_well(event)
                yield event

    async def _model_info(self) -> Mapping[str, Any]:
        """Return the server's information about its model; {} if it has none."""
        info = await self._http.find("/get_model_info", "/model_info")  # the first is SGLang's older name
        return info if isinstance(info, dict) else {}

    async def _tokenize(self, texts: list[str]) -> list[list[int]]:
        """Return the token ids of texts, with the tokens that the model needs before each prompt.

        A server without /v1/tokenize must compute the texts; the token ids are then read from their log-probabilities.
        """
        if self._tokenizes:
            try:
                answer = await self._http.json("POST", "/v1/tokenize", {"prompt": texts})
                return tokenized(answer, len(texts), self._source("/v1/tokenize"))
            except UnsupportedFeatureError:
                self._tokenizes = False
        options = {"return_logprob": True, "logprob_start_len": 0, "sampling_params": _PROMPT_ONLY}
        answers = await self._answers({"text": texts, **options}, len(texts))
        return [prompt_token_ids(answer["meta_info"], self._source("/generate")) for answer in answers]

    def _source(self, path: str) -> str:
        """Return the URL that errors name as the source of an answer."""
        return f"{self._http.url}{path}"


_JSON_NAMES: Final[Mapping[type, str]] = {str: "string", dict: "object"}

#: Sampling parameters of a request that computes the prompt and generates nothing.
_PROMPT_ONLY: Final = {"max_new_tokens": 0, "temperature": 0.0}


def _body(request: GenerationRequest) -> dict[str, Any]:
    """Return the body of /generate."""
    given = request.sampling.given()
    top_level: dict[str, Any] = {name: given.pop(name) for name in _TOP_LEVEL if name in given}
    sampling = {_RENAMED.get(name, name): value for name, value in given.items()}
    if request.sampling.stop_regex:
        sampling["no_stop_trim"] = True  # the language keeps the match
    images = {"image_data": [base64.b64encode(one).decode() for one in request.images]} if request.images else {}
    return {"text": request.prompt, "sampling_params": sampling, **top_level, **images}


def _hint(base_url: str) -> str:
    return "leave /v1 out of base_url" if str(base_url).rstrip("/").endswith("/v1") else ""


def _generation(answer: Mapping[str, Any]) -> Generation:
    meta_info = dict(answer["meta_info"])
    if isinstance(logprobs := meta_info.get("output_token_logprobs"), list):
        meta_info.setdefault("output_token_logprobs_length", len(logprobs))
    return Generation(answer["text"], meta_info)


def _check_grows(before: str, text: str) -> None:
    if not text.startswith(before):
        raise UnsupportedFeatureError(
            "the server streams pieces of text, but each event must have the whole text so far; start SGLang without "
            "--incremental-streaming-output"
        )


def _is_completion(answer: Any) -> bool:
    if not isinstance(answer, dict) or not isinstance(answer.get("text"), str):
        return False
    meta_info = answer.get("meta_info")
    return isinstance(meta_info, dict) and isinstance(meta_info.get("finish_reason"), dict | None)


def _check_ended_well(answer: Any) -> None:
    if not _is_completion(answer):
        raise EngineError(f"the server must answer /generate with text and meta_info, got {reprlib.repr(answer)}")
    reason = answer["meta_info"].get("finish_reason")
    if reason is not None and reason.get("type") == "abort":
        raise RequestFailedError(f"the server ended the request: {reason.get('message', 'it was aborted')}")


def _template_of(info: Mapping[str, Any], name: str | None, source: str) -> ChatTemplate:
    """Return the template that a server reports, or the template `name`, or one that matches the model's name.

    Raises:
        EngineError: the answer of `source` has no valid template.
        UnsupportedFeatureError: see `find_template`.
    """
    if name is not None or not info.get("chat_template"):
        return find_template(name, str(info.get("model_path", "")))
    template, prefix = info["chat_template"], info.get("prompt_prefix") or ""
    tokens = info.get("special_tokens") or {}
    for key, value, kind in (
        ("chat_template", template, str),
        ("prompt_prefix", prefix, str),
        ("special_tokens", tokens, dict),
    ):
        if not isinstance(value, kind):
            raise EngineError(
                f"{source} answered a {key} that is not a JSON {_JSON_NAMES[kind]}: {reprlib.repr(value)}"
            )
    try:
        return ChatTemplate(jinja_renderer(template, tokens), added_prefix=prefix)
    except ConfigError as error:
        raise EngineError(f"{source} answered a chat_template that cannot be used: {error}") from error
