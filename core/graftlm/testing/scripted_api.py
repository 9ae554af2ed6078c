"""An endpoint like OpenAI's, on a free port, whose model writes what a test says."""

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
    """Return a model that goes on with a prompt as the first document that begins with it does, if there is one."""

    def says(prompt: str) -> str:
        return next((d[len(prompt) :] for d in documents if d.startswith(prompt)), "")

    return says


@dataclass(frozen=True, slots=True)
class ScriptedModel:
    """What a scripted endpoint answers with.

    Attributes:
        says: from a prompt to all that the model writes behind it, until it ends by itself. The prompt of a chat is
            its last user message, and the answer the whole message of the assistant.
        reasons: what it says in a chat's `reasoning_content`, from the same prompt.
        logprob: from the text so far and a token behind it to the token's log-probability.
        alternatives: tokens told besides the one that was written, as the likeliest at each place.
    """

    says: Callable[[str], str]
    reasons: Callable[[str], str] = lambda prompt: ""
    logprob: Callable[[str, str], float] = lambda text, token: -0.1
    alternatives: Sequence[str] = ()

    def tokens(self, text: str) -> list[str]:
        """Return a text's tokens: words with the white space before them, and single other characters."""
        return _TOKEN.findall(text)


@dataclass(frozen=True, slots=True)
class _Written:
    """One completion: its text, the tokens it took, and why it ended."""

    text: str
    tokens: list[str]
    finish_reason: str


class ScriptedApi:
    """Serves `/v1/chat/completions` and `/v1/completions`, whole and streamed, in a thread of its own.

        with ScriptedApi(ScriptedModel(writes_on("1 + 1 = 2"))) as api:
            OpenAI("any", base_url=api.url)

    Attributes:
        url: of the API.
        refused: fields of a body that are answered with 400.
        ignored: fields of a body that are not read.
        bodies: of the requests so far, in order.
        prompt_tokens: of all answers together.
        under_way: requests that have come and not been answered.
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
        """Start it.

        Args:
            refused: as the attribute, which may change.
            ignored: as the attribute.
            tells_logprobs: otherwise the field is accepted, and null in the answer.
            tells_usage: otherwise no answer has token counts.
            dies_after: events of a stream after which the connection breaks.
            hangs: never answer.
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
        """End it; requests under way are broken off."""
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
                return web.json_response({"error": {"message": f"no {', '.join(sorted(refused))} here"}}, status=400)
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
                assert request.transport is not None  # it is open, the answer is under way
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
        wanted = body.get("logprobs")  # of completions, a number that may be 0
        if wanted is not None and wanted is not False and self._tells_logprobs:
            tokens = self._model.tokens(echo) + written.tokens
            choice["logprobs"] = self._logprobs("" if echo else prompt, tokens, is_chat)
        if is_chat:
            message = {"role": "assistant", "content": written.text}
            return choice | {"message": message | self._reasoning(prompt)}
        return choice | {"text": echo + written.text}

    def _logprobs(self, before: str, tokens: Sequence[str], is_chat: bool) -> dict[str, Any]:
        numbers, places, offsets, at = list[float](), list[dict[str, float]](), list[int](), 0
        for token in tokens:
            numbers.append(self._model.logprob(before, token))
            likely = {t: self._model.logprob(before, t) for t in (token, *self._model.alternatives)}
            places.append(dict(sorted(likely.items(), key=lambda pair: -pair[1])))
            offsets.append(at)
            at, before = at + len(token), before + token
        if not is_chat:
            return {"tokens": list(tokens), "token_logprobs": numbers, "top_logprobs": places, "text_offset": offsets}
        rows = zip(tokens, numbers, places, strict=True)
        return {
            "content": [
                {"token": t, "logprob": p, "top_logprobs": [{"token": k, "logprob": v} for k, v in place.items()]}
                for t, p, place in rows
            ]
        }


def _prompts(body: Mapping[str, Any], is_chat: bool) -> list[str]:
    """Return what the model is asked: of a chat, its last user message."""
    if is_chat:
        return [message["content"] for message in body["messages"] if message["role"] == "user"][-1:]
    return [body["prompt"]] if isinstance(body["prompt"], str) else list(body["prompt"])


def _pieces(written: _Written) -> list[str]:
    """Return a completion's text, cut where its tokens are; the last of them may be part of a stop string."""
    pieces, rest = list[str](), written.text
    for token in written.tokens:
        pieces.append(rest[: len(token)])
        rest = rest[len(token) :]
    return pieces or [""]


async def _send(response: web.StreamResponse, event: Mapping[str, Any]) -> None:
    await response.write(f"data: {json.dumps(event)}\n\n".encode())
