"""The request bodies and the answers of the two kinds of endpoints."""

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from graftlm.errors import (
    EngineError,
    InvalidPromptError,
    RequestFailedError,
    SamplingParamsError,
    UnsupportedFeatureError,
)
from graftlm.lang.backend import Generation, GenerationRequest
from graftlm.lang.backends.openai.fields import (
    CallTokens,
    call_tokens,
    choices_of,
    common_fields,
    finish_reason,
    max_tokens_of,
    tokens_of_each,
)
from graftlm.lang.chat_template import ChatTemplate
from graftlm.lang.sampling import Sampling

__all__ = ["CHAT_TEXT_FORMAT", "ChatDialect", "ChatFeatures", "CompletionDialect", "Dialect", "Growing", "Piece"]

#: The template that formats chats in a program's text if the endpoint is a chat endpoint. The endpoint gets messages,
#: not this text.
CHAT_TEXT_FORMAT: Final = "chatml"

_ROLES: Final = ("system", "user", "assistant")


@dataclass(frozen=True, slots=True)
class Piece:
    """A completion, or the part of a completion that one event contains.

    Attributes:
        tokens: [log-probability, token id, text] of each token.
        top: for each token, the most likely tokens at its position, each as [log-probability, token id, text].
    """

    text: str = ""
    reasoning: str = ""
    tokens: tuple[list[Any], ...] = ()
    top: tuple[list[list[Any]], ...] = ()

    def __add__(self, other: "Piece") -> "Piece":
        return Piece(
            self.text + other.text,
            self.reasoning + other.reasoning,
            self.tokens + other.tokens,
            self.top + other.top,
        )


@dataclass(slots=True)
class Growing:
    """A streamed completion so far."""

    piece: Piece = field(default_factory=Piece)
    tokens: CallTokens = field(default_factory=CallTokens)
    last: dict[str, Any] = field(default_factory=dict)


class Dialect(ABC):
    """One kind of endpoint.

    Attributes:
        path: path of the endpoint after the base URL.
        max_top_logprobs: maximum number of most likely tokens that the endpoint reports for each position.
        writes_whole_messages: whether the endpoint can only write whole messages.
    """

    path: str
    writes_whole_messages: bool
    max_top_logprobs: int

    def __init__(self, model: str) -> None:
        self._model = model

    @abstractmethod
    def body(self, request: GenerationRequest) -> dict[str, Any]:
        """Return the body of a request.

        Raises:
            RequestError: the endpoint does not support the request.
        """

    def written(self, request: GenerationRequest) -> str:
        """Return the beginning of the answer that is already in the program's text."""
        return ""

    @abstractmethod
    def _piece(self, choice: Mapping[str, Any]) -> Piece:
        """Return the Piece that one choice of an answer or event contains."""

    def generations(self, request: GenerationRequest, answer: Any) -> list[Generation]:
        """Return the completions of an answer.

        Raises:
            EngineError: the number of completions differs from the requested number, or a completion has no text.
            UnsupportedFeatureError: the answer has one completion, but several were requested.
            RequestFailedError: a completion does not start with the program's text.
        """
        choices, tokens, call_id = choices_of(answer), call_tokens(answer), str(answer.get("id", ""))
        expected = request.sampling.n or 1
        if len(choices) == 1 < expected:
            raise UnsupportedFeatureError(f"n={expected}: the endpoint answered one completion; it may not support n")
        if len(choices) != expected:
            raise EngineError(f"the endpoint answered {len(choices)} choices, expected n={expected}: {answer!r:.200}")
        for choice in choices:
            self._check_whole(choice)
        pieces = [self._piece(choice) for choice in choices]
        letters = [len(piece.reasoning + piece.text) for piece in pieces]
        known = [_known_tokens(request, choice, piece) for choice, piece in zip(choices, pieces, strict=True)]
        numbers = [tokens.completion] if len(choices) == 1 else tokens_of_each(tokens.completion, letters, known)
        return [
            self._generation(request, call_id, choice, piece, replace(tokens, completion=number))
            for choice, piece, number in zip(choices, pieces, numbers, strict=True)
        ]

    @abstractmethod
    def _check_whole(self, choice: Mapping[str, Any]) -> None:
        """Raise EngineError for a choice without text. Not called for a stream, whose events may have no text."""

    def growing(self) -> Growing:
        """Return an empty streamed completion."""
        return Growing()

    def grown(self, request: GenerationRequest, growing: Growing, event: Any) -> Generation:
        """Add an event of a stream and return the completion so far."""
        for choice in choices_of(event)[:1]:  # the last event has token counts, but no choice
            growing.piece += self._piece(choice)
            growing.last = choice if choice.get("finish_reason") is not None else growing.last
        if event.get("usage"):
            growing.tokens = call_tokens(event)
        return self._generation(request, str(event.get("id", "")), growing.last, growing.piece, growing.tokens)

    def _generation(
        self, request: GenerationRequest, call_id: str, choice: Mapping[str, Any], piece: Piece, tokens: CallTokens
    ) -> Generation:
        meta: dict[str, Any] = {
            "id": call_id,
            "finish_reason": finish_reason(choice, tokens.completion),
            "prompt_tokens": tokens.prompt,
            "completion_tokens": tokens.completion,
            "cached_tokens": tokens.cached,
        }
        if request.sampling.return_logprob:
            meta["output_token_logprobs"] = list(piece.tokens)
            meta["output_token_logprobs_length"] = len(piece.tokens)
            if request.sampling.top_logprobs_num:
                meta["output_top_logprobs"] = list(piece.top)
        if piece.reasoning:
            meta["reasoning_content"] = piece.reasoning
        return Generation(_without_beginning(self.written(request), piece.text), meta)


def _known_tokens(request: GenerationRequest, choice: Mapping[str, Any], piece: Piece) -> int | None:
    """Return a completion's number of tokens if its choice implies it, else None."""
    if piece.tokens:
        return len(piece.tokens)
    return max_tokens_of(request.sampling) if choice.get("finish_reason") == "length" else None


def _without_beginning(written: str, text: str) -> str:
    if not text.startswith(written):
        raise RequestFailedError(
            f"the model's message must start with the program's text {written!r:.120}, but it is {text!r:.120}; ask "
            "for this start in the previous message"
        )
    return text[len(written) :]


class CompletionDialect(Dialect):
    """`/completions`: continues any text."""

    path = "/completions"
    max_top_logprobs = 5
    writes_whole_messages = False

    def body(self, request: GenerationRequest) -> dict[str, Any]:
        """Return the body of a request; see Dialect."""
        sampling = request.sampling
        fields = common_fields(sampling)
        if sampling.return_logprob:
            fields["logprobs"] = sampling.top_logprobs_num or 0
        fields["max_tokens"] = max_tokens_of(sampling)
        return {"model": self._model, "prompt": request.prompt, **fields}

    def scoring_body(self, texts: Sequence[str]) -> dict[str, Any]:
        """Return the body of a request that echoes texts with their log-probabilities."""
        options = {"echo": True, "logprobs": 0, "max_tokens": 1, "temperature": 0.0}
        return {"model": self._model, "prompt": list(texts), **options}

    def _check_whole(self, choice: Mapping[str, Any]) -> None:
        if not isinstance(choice.get("text"), str):
            raise EngineError(f"the endpoint answered a choice without text: {choice!r:.200}")

    def _piece(self, choice: Mapping[str, Any]) -> Piece:
        logprobs = choice.get("logprobs") or {}
        pairs = zip(logprobs.get("token_logprobs") or (), logprobs.get("tokens") or (), strict=True)
        top_of_token = [place or {} for place in logprobs.get("top_logprobs") or ()]
        top = [[[p, None, text] for text, p in place.items()] for place in top_of_token]
        return Piece(choice.get("text") or "", "", tuple([[p, None, text] for p, text in pairs]), tuple(top))


@dataclass(frozen=True, slots=True)
class ChatFeatures:
    """The properties in which chat endpoints differ.

    Attributes:
        continues: whether the endpoint can continue a partial message.
        continue_fields: fields of the body of a request that continues a partial message.
        limit_name: name of the body's field with the maximum number of tokens.
        takes_text: whether a program's text without messages is sent as one message of the user.
        added: parameters that the endpoint has in addition to those of OpenAI's API.
        lacking: parameters of OpenAI's API that the endpoint lacks.
    """

    continues: bool = False
    continue_fields: Mapping[str, Any] = field(
        default_factory=lambda: {"continue_final_message": True, "add_generation_prompt": False}
    )
    limit_name: str = "max_tokens"
    takes_text: bool = False
    added: tuple[str, ...] = ()
    lacking: tuple[str, ...] = ()


class ChatDialect(Dialect):
    """`/chat/completions`: answers a list of messages.

    It cannot continue a partial message, unless it supports `continue_final_message`. If the program has written the
    beginning of an answer, the whole message is requested, and must start with this beginning.
    """

    path = "/chat/completions"
    max_top_logprobs = 20

    def __init__(self, model: str, template: ChatTemplate, features: ChatFeatures) -> None:
        """Create the dialect of one endpoint.

        Args:
            template: format of chats in the program's text; the endpoint does not see it.
        """
        super().__init__(model)
        self._template = template
        self._features = features
        self.writes_whole_messages = not features.continues

    def body(self, request: GenerationRequest) -> dict[str, Any]:
        """Return the body of a request; see Dialect."""
        sampling, features = request.sampling, self._features
        messages = self._messages(request)
        fields = common_fields(sampling, taken=("json_schema",), added=features.added, lacking=features.lacking)
        if sampling.return_logprob:
            fields |= {"logprobs": True} | ({"top_logprobs": n} if (n := sampling.top_logprobs_num) else {})
        if sampling.json_schema is not None:
            fields["response_format"] = _response_format(sampling.json_schema)
        if messages[-1]["role"] == "assistant":
            fields |= features.continue_fields
        fields[features.limit_name] = max_tokens_of(sampling)
        return {"model": self._model, "messages": messages, **fields}

    def written(self, request: GenerationRequest) -> str:
        """Return the text with which the answer must start; see Dialect."""
        return "" if self._features.continues or not request.messages else str(request.messages[-1]["content"])

    def _messages(self, request: GenerationRequest) -> list[dict[str, Any]]:
        chat = request.messages
        if self._features.takes_text and not chat and not self._has_messages(request.prompt):
            return [{"role": "user", "content": request.prompt}]
        if not chat or chat[-1]["role"] != "assistant":
            raise InvalidPromptError(self._about_messages())
        if self._template.text_of(chat) != request.prompt:
            raise InvalidPromptError("a chat endpoint only gets messages: append no text outside of messages")
        messages = [dict(message) for message in chat]
        if self._features.continues and chat[-1]["content"]:
            return messages
        if chat[-1]["content"]:
            _check_may_be_whole(request.sampling)
        return messages[:-1]

    def _has_messages(self, text: str) -> bool:
        return any(self._template.opening([role]) in text for role in _ROLES)

    def _about_messages(self) -> str:
        about = "a chat endpoint answers messages: use gen and select within assistant(...), after a user(...)"
        if self._features.takes_text:
            return f"{about}; or use no messages at all"
        return f"{about}; if the endpoint can complete text, create the backend with is_chat=False"

    def _check_whole(self, choice: Mapping[str, Any]) -> None:
        message = choice.get("message")
        if not isinstance(message, dict) or not isinstance(message.get("content"), str | None):
            raise EngineError(f"the endpoint answered a choice without a message: {choice!r:.200}")

    def _piece(self, choice: Mapping[str, Any]) -> Piece:
        message = choice.get("message") or choice.get("delta") or {}
        reasoning = message.get("reasoning_content") or message.get("reasoning") or ""
        content = (choice.get("logprobs") or {}).get("content") or ()
        tokens = [[token["logprob"], None, token["token"]] for token in content]
        top = [[[t["logprob"], None, t["token"]] for t in token.get("top_logprobs") or ()] for token in content]
        return Piece(message.get("content") or "", reasoning, tuple(tokens), tuple(top))


def _check_may_be_whole(sampling: Sampling) -> None:
    """Refuse parameters whose result would differ if the endpoint writes the whole message."""
    names = ("stop", "return_logprob", "json_schema")
    refused = [name for name in names if getattr(sampling, name)]
    if refused:
        raise UnsupportedFeatureError(
            f"{', '.join(refused)}: a chat endpoint cannot continue a partial message. Start the message with gen, or "
            "use @function(num_api_spec_tokens=...) for several gens with stop strings in one message, or create the "
            "backend with continue_final_message=True if the server supports it"
        )


def _response_format(json_schema: str) -> dict[str, Any]:
    try:
        schema = json.loads(json_schema)
    except ValueError as error:
        raise SamplingParamsError(f"json_schema {json_schema!r:.80} is not JSON: {error}") from None
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}
