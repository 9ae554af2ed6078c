"""From the body of a /generate request to its prompts, each with what applies to it alone."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from graftlm.errors import InvalidPromptError, RequestError
from graftlm.request_options import DEFAULT_OPTIONS, RequestOptions
from graftlm.server.cache_namespace import namespace_of
from graftlm.server.native.requests import GenerateRequest, SamplingRequest
from graftlm.types import SamplingParams, TokenIds

__all__ = ["NativePrompt", "is_list", "split_request"]

T = TypeVar("T")

#: SGLang's names for fields of SamplingParams; the others are the same.
_RENAMED = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "no_stop_trim": "include_stop",
    "sampling_seed": "seed",
}
_WITHOUT_EFFECT = frozenset({"spaces_between_special_tokens"})


@dataclass(frozen=True, slots=True)
class NativePrompt:
    """One prompt of a /generate request.

    Attributes:
        request_id: as the client gave it; None draws one.
        logprob_start: the prompt token from which on log-probabilities are reported; None reports none.
        prompt_only: no output is wanted; the one token that the engine generates at least is not shown.
    """

    prompt: str | TokenIds
    params: SamplingParams
    options: RequestOptions = DEFAULT_OPTIONS
    request_id: str | None = None
    logprob_start: int | None = None
    prompt_only: bool = False

    @property
    def grammar_field(self) -> str | None:
        """The field of the body that the grammar comes from, None if there is none."""
        name = self.params.grammar_field
        return None if name is None else f"sampling_params.{name}"


def is_list(body: GenerateRequest) -> bool:
    """Whether the client sent a list of prompts, and so gets a list of answers."""
    if body.text is not None:
        return isinstance(body.text, list)
    return isinstance(body.input_ids, list)


def split_request(body: GenerateRequest) -> list[NativePrompt]:
    """Return the prompts of a request.

    Raises:
        RequestError: a list has not one entry for each prompt, or two parts of the body contradict each other.
    """
    prompts = _prompts(body)
    spread = _Spread(len(prompts))
    sampling = spread(body.sampling_params, "sampling_params")
    logprobs = zip(
        spread(body.return_logprob, "return_logprob"),
        spread(body.logprob_start_len, "logprob_start_len"),
        spread(body.top_logprobs_num, "top_logprobs_num"),
        strict=True,
    )
    salts = zip(spread(body.cache_salt, "cache_salt"), spread(body.extra_key, "extra_key"), strict=True)
    adapters: list[str | None] = spread(body.lora_path, "lora_path")  # type: ignore[arg-type]  # it may hold nulls
    options = [
        RequestOptions(priority=body.priority or 0, cache_salt=namespace_of(*salt), adapter=adapter)
        for salt, adapter in zip(salts, adapters, strict=True)
    ]
    parts = zip(prompts, sampling, logprobs, _request_ids(body, spread), options, strict=True)
    return [
        _prompt(prompt, params or SamplingRequest(), wants, request_id, its_options)
        for prompt, params, wants, request_id, its_options in parts
    ]


def _prompts(body: GenerateRequest) -> list[str | TokenIds]:
    given = [name for name in ("text", "input_ids") if getattr(body, name) is not None]
    if len(given) != 1:
        raise InvalidPromptError(f"give one of text and input_ids, got {' and '.join(given) or 'neither'}")
    prompts: Any = body.text if body.input_ids is None else body.input_ids
    if not is_list(body):
        return [prompts]
    if not prompts:
        raise InvalidPromptError(f"{given[0]} is an empty list; give at least one prompt")
    return list(prompts)


class _Spread:
    """Gives each prompt its own of what may be one value for all, or a list."""

    def __init__(self, num_prompts: int) -> None:
        self.num_prompts = num_prompts

    def __call__(self, value: T | Sequence[T] | None, name: str) -> list[T | None]:
        if not isinstance(value, list):
            one: Any = value
            return [one] * self.num_prompts
        if len(value) != self.num_prompts:
            raise RequestError(
                f"{name}: got {len(value)} entries, expected one for each of {self.num_prompts} prompt(s)"
            )
        return list(value)


def _request_ids(body: GenerateRequest, spread: _Spread) -> list[str | None]:
    if isinstance(body.rid, str) and is_list(body):
        return [f"{body.rid}_{i}" for i in range(spread.num_prompts)]
    ids = spread(body.rid, "rid")
    if isinstance(body.rid, list) and len(set(ids)) < len(ids):
        twice = next(request_id for request_id in ids if ids.count(request_id) > 1)
        raise RequestError(f"rid: {twice!r} is given twice in this call; give every request its own")
    return ids


def _prompt(
    prompt: str | TokenIds,
    sampling: SamplingRequest,
    wants: tuple[bool | None, int | None, int | None],
    request_id: str | None,
    options: RequestOptions,
) -> NativePrompt:
    return_logprob, start, num_top = wants
    if not return_logprob or start is None or start < 0:
        start = None
    fields = _sampling_fields(sampling)
    prompt_only = fields.get("max_tokens") == 0
    if prompt_only:
        fields["max_tokens"] = 1
    if return_logprob:
        fields["logprobs"] = num_top or 0
    if start is not None:
        fields["prompt_logprobs"] = num_top or 0
        fields["prompt_logprobs_start"] = start + 1  # that of `start` itself is never shown
    return NativePrompt(
        prompt=prompt,
        params=SamplingParams(**fields),
        options=options,
        request_id=request_id,
        logprob_start=start,
        prompt_only=prompt_only,
    )


def _sampling_fields(sampling: SamplingRequest) -> dict[str, Any]:
    fields = {_RENAMED.get(name, name): _CONVERT.get(name, _as_is)(value) for name, value in sampling.given().items()}
    if "max_new_tokens" in sampling.model_fields_set and sampling.max_new_tokens is None:
        fields["max_tokens"] = None  # the one field whose null says something
    return {name: value for name, value in fields.items() if name not in _WITHOUT_EFFECT}


def _as_is(value: Any) -> Any:
    return value


_CONVERT: dict[str, Callable[[Any], Any]] = {
    "top_k": lambda k: None if k == -1 else k,
    # As text, so that what no message between processes could carry is refused as a bad schema.
    "json_schema": lambda schema: schema if isinstance(schema, str) else json.dumps(schema),
    "structural_tag": lambda tag: tag if isinstance(tag, str) else json.dumps(tag),
    "stop_token_ids": lambda ids: tuple(dict.fromkeys(ids)),
}
