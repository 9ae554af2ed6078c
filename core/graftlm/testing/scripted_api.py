"""A server with OpenAI's endpoints on a free port, for which a test defines the model's answers."""

import asyncio
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Self

from aiohttp import web

from graftlm.testing.app_server import AppServer

__all__ = ["ScriptedApi", "ScriptedModel", "writes_on"]

_TOKEN: Final = re.compile(r"\s?\w+|\W")


def writes_on(*documents: str) -> Callable[[str], str]:
    """Return a function that continues a prompt with the rest of the first document that starts with the prompt.

    If there is no such document, the function returns an empty text.
    """

    def says(prompt: str) -> str:
        return next((d[len(prompt) :] for d in documents if d.startswith(prompt)), "")

    return says


@dataclass(frozen=True, slots=True)
class ScriptedModel:
    """The simulated model of a scripted API.

    Attributes:
        says: function from a prompt to the model's full answer. In a chat, the prompt is the last user message, and the
            answer is the whole message of the assistant.
        reasons: function from the same prompt to the `reasoning_content` of a chat's answer.
        logprob: function from (text so far, next token) to the log-probability of the next token.
        alternatives: tokens that each position lists as most likely tokens, in addition to the generated token.
    """

    says: Callable[[str], str]
    reasons: Callable[[str], str] = lambda prompt: ""
    logprob: Callable[[str, str], float] = lambda text, token: -0.1
    alternatives: Sequence[str] = ()

    def tokens(self, text: str) -> list[str]:
        """Return the tokens of a text: words with the white space before them, and single other characters."""
        return _TOKEN.findall(text)


@dataclass(frozen=True, slots=True)
class _Written:
    """One completion: its text, its generated tokens, and its finish_reason."""

    text: str
    tokens: list[str]
    finish_reason: str


class ScriptedApi:
    """A server of `/v1/chat/completions` and `/v1/completions`, with and without streaming, in a separate thread.

        with ScriptedApi(ScriptedModel(writes_on("1 + 1 = 2"))) as api:
            OpenAI("any", base_url=api.url)

    Attributes:
        url: URL of the API, with `/v1`.
        refused: names of fields; a request whose body has such a field gets status 400.
        ignored: names of fields of a request's body that have no effect.
        bodies: bodies of all requests so far, in order.
        prompt_tokens: total number of prompt tokens in all answers.
        under_way: number of requests that have arrived and are not answered yet.
    """

    def __init__(
        self,
        model: ScriptedModel,
        *,
        refused: Sequence[str] = (),
        ignored: Sequence[str] = (),
        tells_logprobs: bool = True,
        tells_usage: bool = True,
        dies_after: int | None = None,
        hangs: bool = False,
    ) -> None:
        """Start the server.

        Args:
            model: the model that defines the answers.
            refused: initial value of the attribute.
            ignored: initial value of the attribute.
            tells_logprobs: whether answers have log-probabilities; if not, a request for log-probabilities gets null.
            tells_usage: whether answers have token counts.
            dies_after: number of a stream's text events after which the connection breaks; None: it never breaks.
            hangs: whether the server never answers.
        """
        self._model = model
        self.refused = frozenset(refused)
        self.ignored = frozenset(ignored)
        self._tells_logprobs = tells_logprobs
        self._tells_usage = tells_usage
        self._dies_after = dies_after
        self._hangs = hangs
        self.bodies: list[dict[str, Any]] = []
        self.prompt_tokens = 0
        self.under_way = 0
        app = web.Application()
        app.router.add_post("/v1/completions", self._answer)
        app.router.add_post("/v1/chat/completions", self._answer)
        self._server = AppServer(app)
        self.url = f"{self._server.url}/v1"

    def close(self) -> None:
        """Stop the server and abort requests that are not answered yet."""
        self._server.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        self.under_way += 1
        try:
            body = await request.json()
            self.bodies.append(body)
            if refused := self.refused & body.keys():
                message = f"this server does not support {', '.join(sorted(refused))}"
                return web.json_response({"error": {"message": message}}, status=400)
            body = {name: value for name, value in body.items() if name not in self.ignored}
            if self._hangs:
                await asyncio.Event().wait()
            is_chat = request.path.endswith("/chat/completions")
            return await self._stream(request, body, is_chat) if body.get("stream") else self._whole(body, is_chat)
        finally:
            self.under_way -= 1

    def _whole(self, body: Mapping[str, Any], is_chat: bool) -> web.Response:
        prompts = _prompts(body, is_chat)
        choices, num_completion = list[dict[str, Any]](), 0
        for prompt in prompts:
            for _ in range(body.get("n") or 1):
                written = self._write(prompt, body, is_chat)
                num_completion += len(written.tokens)
                choices.append(self._choice(len(choices), prompt, written, body, is_chat))
        usage = self._usage(body, prompts, num_completion, is_chat)
        return web.json_response({"id": f"scripted-{len(self.bodies)}", "choices": choices, "usage": usage})

    async def _stream(self, request: web.Request, body: Mapping[str, Any], is_chat: bool) -> web.StreamResponse:
        (prompt,) = _prompts(body, is_chat)
        written = self._write(prompt, body, is_chat)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        if is_chat:
            await _send(response, {"choices": [{"index": 0, "delta": {"role": "assistant"} | self._reasoning(prompt)}]})
        pieces = _pieces(written)
        for i, piece in enumerate(pieces):
            if i == self._dies_after:
                assert request.transport is not None  # the connection is open, because the answer is not complete
                request.transport.abort()
                return response
            content = {"delta": {"content": piece}} if is_chat else {"text": piece}
            reason = written.finish_reason if i == len(pieces) - 1 else None
            await _send(response, {"choices": [{"index": 0, **content, "finish_reason": reason}]})
        usage = self._usage(body, [prompt], len(written.tokens), is_chat)
        await _send(response, {"choices": [], "usage": usage})
        await response.write(b"data: [DONE]\n\n")
        return response

    def _write(self, prompt: str, body: Mapping[str, Any], is_chat: bool) -> _Written:
        whole = self._model.says(prompt)
        if is_chat and body.get("continue_final_message"):
            whole = whole.removeprefix(body["messages"][-1]["content"])
        tokens, stops = self._model.tokens(whole), body.get("stop") or ()
        limit = body.get("max_tokens") or len(tokens)
        text = ""
        for i, token in enumerate(tokens[:limit]):
            text += token
            found = [at for stop in stops if (at := text.find(stop)) >= 0]
            if found:
                return _Written(text[: min(found)], tokens[: i + 1], "stop")
        return _Written(text, tokens[:limit], "length" if len(tokens) > limit else "stop")

    def _reasoning(self, prompt: str) -> dict[str, str]:
        reasoning = self._model.reasons(prompt)
        return {"reasoning_content": reasoning} if reasoning else {}

    def _usage(
        self, body: Mapping[str, Any], prompts: Sequence[str], num_completion: int, is_chat: bool
    ) -> dict[str, int] | None:
        texts = [message["content"] for message in body["messages"]] if is_chat else list(prompts)
        num_prompt = sum(len(self._model.tokens(text)) for text in texts)
        self.prompt_tokens += num_prompt
        if not self._tells_usage:
            return None
        return {
            "prompt_tokens": num_prompt, "completion_tokens": num_completion,
            "total_tokens": num_prompt + num_completion,
        }  # fmt: skip

    def _choice(
        self, index: int, prompt: str, written: _Written, body: Mapping[str, Any], is_chat: bool
    ) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": index, "finish_reason": written.finish_reason, "logprobs": None}
        echo = prompt if body.get("echo") else ""
        wanted = body.get("logprobs")  # in requests for completions, a number that may be 0
        if wanted is not None and wanted is not False and self._tells_logprobs:
            tokens = self._model.tokens(echo) + written.tokens
            choice["logprobs"] = self._logprobs("" if echo else prompt, tokens, is_chat)
        if is_chat:
            message = {"role": "assistant", "content": written.text}
            return choice | {"message": message | self._reasoning(prompt)}
        return choice | {"text": echo + written.text}

    def _logprobs(self, before: str, tokens: Sequence[str], is_chat: bool) -> dict[str, Any]:
        numbers, tops, offsets, offset = list[float](), list[dict[str, float]](), list[int](), 0
        for token in tokens:
            numbers.append(self._model.logprob(before, token))
            likely = {t: self._model.logprob(before, t) for t in (token, *self._model.alternatives)}
            tops.append(dict(sorted(likely.items(), key=lambda pair: -pair[1])))
            offsets.append(offset)
            offset, before = offset + len(token), before + token
        if not is_chat:
            return {"tokens": list(tokens), "token_logprobs": numbers, "top_logprobs": tops, "text_offset": offsets}
        rows = zip(tokens, numbers, tops, strict=True)
        return {
            "content": [
                {"token": t, "logprob": p, "top_logprobs": [{"token": k, "logprob": v} for k, v in top.items()]}
                for t, p, top in rows
            ]
        }


def _prompts(body: Mapping[str, Any], is_chat: bool) -> list[str]:
    """Return the prompts of a request. The only prompt of a chat is its last user message."""
    if is_chat:
        return [message["content"] for message in body["messages"] if message["role"] == "user"][-1:]
    return [body["prompt"]] if isinstance(body["prompt"], str) else list(body["prompt"])


def _pieces(written: _Written) -> list[str]:
    """Return a completion's text in pieces, one per token. If a stop string was removed, the last one is shorter."""
    pieces, rest = list[str](), written.text
    for token in written.tokens:
        pieces.append(rest[: len(token)])
        rest = rest[len(token) :]
    return pieces or [""]


async def _send(response: web.StreamResponse, event: Mapping[str, Any]) -> None:
    await response.write(f"data: {json.dumps(event)}\n\n".encode())
