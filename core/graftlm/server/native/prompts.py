"""Conversion of the body of a /generate request into prompts, each with its own parameters."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from graftlm.errors import InvalidPromptError, RequestError
from graftlm.prompts import Prompt, with_images
from graftlm.request_options import DEFAULT_OPTIONS, RequestOptions
from graftlm.server.cache_namespace import namespace_of
from graftlm.server.native.requests import GenerateRequest, SamplingRequest
from graftlm.types import SamplingParams

__all__ = ["NativePrompt", "is_list", "split_request"]

T = TypeVar("T")

#: SGLang's name -> name in SamplingParams. All other fields have the same name.
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
        request_id: the client's id; None if the server creates one.
        logprob_start: index of the first prompt token whose log-probability is reported; None if none are reported.
        prompt_only: whether the client requests no output. The engine generates one token, which the answer omits.
        given_max_tokens: the client's limit of output tokens; None if the client set none.
    """

    prompt: Prompt
    params: SamplingParams
    options: RequestOptions = DEFAULT_OPTIONS
    request_id: str | None = None
    logprob_start: int | None = None
    prompt_only: bool = False
    given_max_tokens: int | None = None

    @property
    def grammar_field(self) -> str | None:
        """The name of the body's field that contains the grammar; None if there is no grammar."""
        name = self.params.grammar_field
        return None if name is None else f"sampling_params.{name}"


def is_list(body: GenerateRequest) -> bool:
    """Return whether the client sent a list of prompts, and therefore gets a list of answers."""
    if body.text is not None:
        return isinstance(body.text, list)
    return isinstance(body.input_ids, list)


def split_request(body: GenerateRequest) -> list[NativePrompt]:
    """Return the prompts of a request.

    Raises:
        RequestError: a list does not have one entry per prompt, or two fields of the body contradict each other.
    """
    prompts = with_images(_prompts(body), body.image_data, is_one=not is_list(body))
    per_prompt = _PerPrompt(len(prompts))
    sampling = per_prompt(body.sampling_params, "sampling_params")
    logprobs = zip(
        per_prompt(body.return_logprob, "return_logprob"),
        per_prompt(body.logprob_start_len, "logprob_start_len"),
        per_prompt(body.top_logprobs_num, "top_logprobs_num"),
        per_prompt.of_lists(body.token_ids_logprob, "token_ids_logprob"),
        strict=True,
    )
    salts = zip(per_prompt(body.cache_salt, "cache_salt"), per_prompt(body.extra_key, "extra_key"), strict=True)
    adapters: list[str | None] = per_prompt(body.lora_path, "lora_path")  # type: ignore[arg-type]  # has null entries
    options = [
        RequestOptions(priority=body.priority or 0, cache_salt=namespace_of(*salt), adapter=adapter)
        for salt, adapter in zip(salts, adapters, strict=True)
    ]
    parts = zip(prompts, sampling, logprobs, _request_ids(body, per_prompt), options, strict=True)
    return [
        _prompt(prompt, params or SamplingRequest(), logprob_fields, request_id, prompt_options)
        for prompt, params, logprob_fields, request_id, prompt_options in parts
    ]


def _prompts(body: GenerateRequest) -> list[Prompt]:
    given = [name for name in ("text", "input_ids") if getattr(body, name) is not None]
    if len(given) != 1:
        raise InvalidPromptError(f"give either text or input_ids, got {' and '.join(given) or 'neither'}")
    prompts: Any = body.text if body.input_ids is None else body.input_ids
    if not is_list(body):
        return [prompts]
    if not prompts:
        raise InvalidPromptError(f"{given[0]} is an empty list; give at least one prompt")
    return list(prompts)


class _PerPrompt:
    """Converts a field into a list of one value per prompt. The field has one value for all prompts, or such a list."""

    def __init__(self, num_prompts: int) -> None:
        self.num_prompts = num_prompts

    def __call__(self, value: T | Sequence[T] | None, name: str) -> list[T | None]:
        if not isinstance(value, list):
            one: Any = value
            return [one] * self.num_prompts
        if len(value) != self.num_prompts:
            raise RequestError(
                f"{name}: got {len(value)} entries, expected one for each of the {self.num_prompts} prompt(s)"
            )
        return list(value)

    def of_lists(self, value: Sequence[Any] | None, name: str) -> list[Sequence[int] | None]:
        """Convert a field whose value for one prompt is a list of numbers."""
        if value and not isinstance(value[0], int):
            return self(value, name)
        return [value] * self.num_prompts


def _request_ids(body: GenerateRequest, per_prompt: _PerPrompt) -> list[str | None]:
    if isinstance(body.rid, str) and is_list(body):
        return [f"{body.rid}_{i}" for i in range(per_prompt.num_prompts)]
    ids = per_prompt(body.rid, "rid")
    if isinstance(body.rid, list) and len(set(ids)) < len(ids):
        repeated = next(request_id for request_id in ids if ids.count(request_id) > 1)
        raise RequestError(f"rid: {repeated!r} is given twice in this call; give a different id for each prompt")
    return ids


def _prompt(
    prompt: Prompt,
    sampling: SamplingRequest,
    logprob_fields: tuple[bool | None, int | None, int | None, Sequence[int] | None],
    request_id: str | None,
    options: RequestOptions,
) -> NativePrompt:
    return_logprob, start, num_top, token_ids = logprob_fields
    if not return_logprob or start is None or start < 0:
        start = None
    fields = _sampling_fields(sampling)
    prompt_only = fields.get("max_tokens") == 0
    if prompt_only:
        fields["max_tokens"] = 1
    if return_logprob:
        fields["logprobs"] = num_top or 0
        fields["logprob_token_ids"] = tuple(token_ids or ())
    if start is not None:
        fields["prompt_logprobs"] = num_top or 0
        fields["prompt_logprobs_start"] = start + 1  # the first entry of the answer has no log-probability
    return NativePrompt(
        prompt=prompt,
        params=SamplingParams(**fields),
        options=options,
        request_id=request_id,
        logprob_start=start,
        prompt_only=prompt_only,
        given_max_tokens=sampling.max_new_tokens if "max_new_tokens" in sampling.model_fields_set else None,
    )


def _sampling_fields(sampling: SamplingRequest) -> dict[str, Any]:
    fields = {_RENAMED.get(name, name): _CONVERT.get(name, _as_is)(value) for name, value in sampling.given().items()}
    if "max_new_tokens" in sampling.model_fields_set and sampling.max_new_tokens is None:
        fields["max_tokens"] = None  # in all other fields, null has the same meaning as a missing field
    return {name: value for name, value in fields.items() if name not in _WITHOUT_EFFECT}


def _as_is(value: Any) -> Any:
    return value


_CONVERT: dict[str, Callable[[Any], Any]] = {
    "top_k": lambda k: None if k == -1 else k,
    # Converted to text, because messages between processes cannot contain every JSON value. An unusual value is then
    # refused later, as a bad schema.
    "json_schema": lambda schema: schema if isinstance(schema, str) else json.dumps(schema),
    "structural_tag": lambda tag: tag if isinstance(tag, str) else json.dumps(tag),
    "stop_token_ids": lambda ids: tuple(dict.fromkeys(ids)),
}
