"""Programs on a server with the native API: graftlm's, or SGLang's."""

import asyncio
import json
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from concurrent.futures import wait
from contextlib import aclosing, asynccontextmanager
from typing import TYPE_CHECKING, Any, Final, Self

from graftlm.errors import (
    EngineError,
    GraftlmError,
    QueueFullError,
    RequestError,
    RequestFailedError,
    RequestTimeoutError,
    UnavailableError,
    UnsupportedFeatureError,
)
from graftlm.lang.backend import Generation, GenerationRequest
from graftlm.lang.backends.room import Room
from graftlm.lang.backends.scoring import ScoringBatch
from graftlm.lang.backends.server_events import server_events
from graftlm.lang.chat_template import ChatTemplate, find_template, jinja_renderer
from graftlm.lang.choices import ChoiceScore
from graftlm.lang.event_loop import is_in_shared_loop, shared_loop

if TYPE_CHECKING:
    import aiohttp

__all__ = ["RuntimeEndpoint"]

#: Fields of Sampling under other names on the wire; those of log-probabilities stand beside the others.
_RENAMED: Final = {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens"}
_BESIDE: Final = ("return_logprob", "logprob_start_len", "top_logprobs_num", "return_text_in_logprobs")

_CLOSE_TIMEOUT_S: Final = 1.0

_ERRORS: Final[Mapping[int, type[GraftlmError]]] = {
    404: UnsupportedFeatureError,
    405: UnsupportedFeatureError,
    408: RequestTimeoutError,
    429: QueueFullError,
    500: RequestFailedError,
    502: UnavailableError,
    503: UnavailableError,
    504: UnavailableError,
}


class RuntimeEndpoint:
    """Runs a program's requests on a server.

        set_default_backend(RuntimeEndpoint("http://127.0.0.1:30000"))

    Args:
        base_url: of the server.
        api_key: sent with each request; `flush_cache` may need the admin's.
        chat_template: a name of `CHAT_TEMPLATES`, for a server that does not tell its own and whose model's name says
            nothing.
        max_requests: under way at a time; more wait here.
        timeout_s: without a byte from the server, after which a request is given up; None: never.
    """

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None = None,
        chat_template: str | None = None,
        max_requests: int = 512,
        timeout_s: float | None = None,
    ) -> None:
        self._url = base_url.rstrip("/")
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._template_name = chat_template
        self._room = Room(max_requests)
        self._timeout_s = timeout_s
        self._chat_template: ChatTemplate | None = None
        self._tokenizes = True  # until it turns out not to
        self._sessions: list[aiohttp.ClientSession] = []
        self._finalizer = weakref.finalize(self, _close, self._sessions)  # also at the end of the process

    # -- the protocol --------------------------------------------------------------------------------------------------

    async def generate(self, request: GenerationRequest) -> list[Generation]:
        """Complete a prompt; see Backend."""
        answers = await self._answers(_body(request))
        return [_generation(answer) for answer in answers]

    async def stream(self, request: GenerationRequest) -> AsyncGenerator[Generation, None]:
        """Complete a prompt, yielding as it grows; see Backend."""
        async with self._room.place():
            answer, rest = await self._room.enter(lambda: _started(self._events(_body(request) | {"stream": True})))
            async with aclosing(rest):
                yield _generation(answer)
                async for answer in rest:
                    yield _generation(answer)
        if answer["meta_info"].get("finish_reason") is None:
            raise UnavailableError(f"{self._url} ended a stream before its text was complete")

    async def score(self, prompt: str, choices: Sequence[str], *, unconditional: bool) -> list[ChoiceScore]:
        """Return how likely each choice is; see Backend."""
        texts = [prompt, *[prompt + choice for choice in choices]]
        before, *whole = await self._tokenize(texts)
        batch = ScoringBatch.of(choices, before, whole, unconditional)
        firsts = [max(start - 1, 0) for start in batch.starts]  # the first one shown has no number
        wish = {"return_logprob": True, "logprob_start_len": firsts, "sampling_params": _PROMPT_ONLY}
        answers = await self._answers({"input_ids": batch.prompts, **wish})
        rows = [
            _numbers(answer["meta_info"]["input_token_logprobs"][start - first :])
            for answer, start, first in zip(answers, batch.starts, firsts, strict=True)
        ]
        return batch.scores(rows, [answer["meta_info"]["cached_tokens"] for answer in answers])

    async def cache_prefix(self, prompt: str) -> None:
        """Have a prompt computed and cached; see Backend."""
        await self._answers({"text": prompt, "sampling_params": _PROMPT_ONLY})

    async def chat_template(self) -> ChatTemplate:
        """Return the server's own, or one that fits its model's name; see Backend."""
        if self._chat_template is None:
            async with self._request("GET", "/get_model_info") as response:
                info = await response.json()
            self._chat_template = _template_of(info, self._template_name)
        return self._chat_template

    async def flush_cache(self) -> None:
        """Forget cached prefixes; see Backend."""
        async with self._request("POST", "/flush_cache") as response:
            await response.read()

    def close(self) -> None:
        """Close its connections; what is under way fails. May be called twice."""
        _close(self._sessions)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- HTTP ----------------------------------------------------------------------------------------------------------

    async def _answers(self, body: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the answers of one call of /generate, all of which ended well."""

        async def call() -> Any:
            async with self._request("POST", "/generate", body) as response:
                return await response.json()

        async with self._room.place():
            answers = await self._room.enter(call)
        answers = answers if isinstance(answers, list) else [answers]
        for answer in answers:
            _check_ended_well(answer)
        return answers

    async def _events(self, body: Mapping[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the answers of a streamed call of /generate."""
        async with (
            self._request("POST", "/generate", body) as response,
            aclosing(server_events(response.content.iter_any())) as events,
        ):
            async for event in events:
                if "error" in event:
                    raise _error_of(500, event)
                _check_ended_well(event)
                yield event

    async def _tokenize(self, texts: list[str]) -> list[list[int]]:
        """Return the token ids of texts, with those that the model wants before each prompt.

        A server that does not tokenize names them with log-probabilities, for which it computes the texts.
        """
        if self._tokenizes:
            try:
                async with self._request("POST", "/v1/tokenize", {"prompt": texts}) as response:
                    token_ids: list[list[int]] = (await response.json())["tokens"]
                return token_ids
            except UnsupportedFeatureError:
                self._tokenizes = False
        wish = {"return_logprob": True, "logprob_start_len": 0, "sampling_params": _PROMPT_ONLY}
        answers = await self._answers({"text": texts, **wish})
        return [[token_id for _, token_id, *_ in a["meta_info"]["input_token_logprobs"]] for a in answers]

    @asynccontextmanager
    async def _request(
        self, method: str, path: str, body: Mapping[str, Any] | None = None
    ) -> AsyncIterator["aiohttp.ClientResponse"]:
        """Yield the answer to a request; leaving closes the connection, upon which the server aborts.

        Raises:
            GraftlmError: the server refuses, or cannot be reached.
        """
        import aiohttp

        try:
            async with self._session().request(method, self._url + path, json=body) as response:
                if response.status >= 400:
                    raise _error_of(response.status, await _json_or_text(response))
                yield response
        except TimeoutError as error:
            raise RequestTimeoutError(f"{self._url} sent nothing for {self._timeout_s} s") from error
        except aiohttp.ClientError as error:
            raise UnavailableError(f"cannot talk to {self._url}: {type(error).__name__}: {error}") from error

    def _session(self) -> "aiohttp.ClientSession":
        import aiohttp

        if not self._sessions:
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=10.0, sock_read=self._timeout_s)
            connector = aiohttp.TCPConnector(limit=0)  # the room bounds them
            self._sessions.append(aiohttp.ClientSession(connector=connector, timeout=timeout, headers=self._headers))
        return self._sessions[0]


#: Computes the prompt and generates nothing.
_PROMPT_ONLY: Final = {"max_new_tokens": 0, "temperature": 0.0}


async def _started(
    events: AsyncGenerator[dict[str, Any], None],
) -> tuple[dict[str, Any], AsyncGenerator[dict[str, Any], None]]:
    """Return a stream's first event, which says that the request has been taken, and the rest."""
    try:
        return await anext(events), events
    except StopAsyncIteration:
        raise UnavailableError("the server ended a stream without an event") from None


def _close(sessions: "list[aiohttp.ClientSession]") -> None:
    """Close sessions in the loop that they live in, and wait a little for it, unless this is that loop."""

    async def close(closing: "list[aiohttp.ClientSession]") -> None:
        for session in closing:
            await session.close()

    closing = list(sessions)
    sessions.clear()
    if not closing:
        return
    closed = asyncio.run_coroutine_threadsafe(close(closing), shared_loop())
    if not is_in_shared_loop():
        wait([closed], _CLOSE_TIMEOUT_S)


def _body(request: GenerationRequest) -> dict[str, Any]:
    """Return the body of /generate."""
    given = request.sampling.given()
    beside: dict[str, Any] = {name: given.pop(name) for name in _BESIDE if name in given}
    sampling = {_RENAMED.get(name, name): value for name, value in given.items()}
    return {"text": request.prompt, "sampling_params": sampling, **beside}


def _generation(answer: Mapping[str, Any]) -> Generation:
    return Generation(answer["text"], dict(answer["meta_info"]))


def _numbers(row: Sequence[Sequence[Any]]) -> tuple[float, ...]:
    return tuple([0.0 if logprob is None else float(logprob) for logprob, *_ in row])


def _check_ended_well(answer: Mapping[str, Any]) -> None:
    reason = answer["meta_info"].get("finish_reason")
    if reason is not None and reason.get("type") == "abort":
        raise RequestFailedError(f"the server gave the request up: {reason.get('message', 'it was aborted')}")


def _template_of(info: Mapping[str, Any], name: str | None) -> ChatTemplate:
    source = info.get("chat_template")
    if name is None and source:
        render = jinja_renderer(source, info.get("special_tokens") or {})
        return ChatTemplate(render, added_prefix=info.get("prompt_prefix") or "")
    return find_template(name, str(info.get("model_path", "")))


async def _json_or_text(response: "aiohttp.ClientResponse") -> Any:
    text = await response.text()
    try:
        return json.loads(text)
    except ValueError:
        return text


def _error_of(status: int, body: Any) -> GraftlmError:
    """Return a server's refusal as the error that fits its status."""
    detail = body.get("error", body) if isinstance(body, dict) else body
    message = detail.get("message", detail) if isinstance(detail, dict) else detail
    kind = _ERRORS.get(status, RequestError if status < 500 else EngineError)
    return kind(f"the server answered {status}: {message}")
