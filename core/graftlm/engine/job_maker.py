"""Converts prompts and parameters to jobs, after checks."""

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from graftlm.engine.jobs import Job
from graftlm.errors import InvalidPromptError, RequestError, SamplingParamsError, UnsupportedFeatureError
from graftlm.intake import Intake, check_ids, draw_seed
from graftlm.media import NO_PICTURES, MediaPrompts, MediaTokens, RequestMedia, has_media
from graftlm.outputs import CompletionText, OutputBuilder
from graftlm.prompts import MediaPrompt, Prompt, check_chat, is_chat
from graftlm.request_options import RequestOptions
from graftlm.tokenization import TextStream, Tokenizer
from graftlm.types import SamplingParams, TokenIds

__all__ = ["Adapters", "JobMaker", "Params"]

#: Sampling parameters in the forms that callers may use.
Params = SamplingParams | Mapping[str, Any] | None

#: One adapter for all prompts, or one for each.
Adapters = str | Sequence[str | None] | None


class JobMaker:
    """Checks prompts and parameters in the caller's thread, and converts them to jobs.

    Args:
        tokenizer: the checkpoint's tokenizer.
        intake: checks prompts and parameters, and makes requests.
        text_stream: function that creates a detokenizer for one completion.
        media: tokenizes prompts with pictures; None: such prompts are refused.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        intake: Intake,
        text_stream: Callable[[SamplingParams], TextStream],
        media: MediaPrompts | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._media = media
        self._intake = intake
        self._text_stream = text_stream

    def jobs(
        self,
        prompts: list[Prompt],
        sampling_params: Params | Sequence[Params],
        options: RequestOptions,
        adapter: Adapters = None,
        request_ids: Sequence[str] | None = None,
    ) -> list[Job]:
        """Check all prompts and parameters, and return one job for each prompt.

        Args:
            sampling_params: one object for all prompts, or one for each.
            options: the options of all prompts, without the adapter.
            adapter: see `Engine.generate`.
            request_ids: one id for each prompt; None: random ids.

        Raises:
            RequestError: a prompt or its parameters are not valid.
        """
        all_params = _params_of_each(sampling_params, len(prompts))
        all_options = [replace(options, adapter=name) for name in _adapter_of_each(adapter, len(prompts))]
        ids = [uuid.uuid4().hex for _ in prompts] if request_ids is None else check_ids(request_ids, len(prompts))
        intake = self._intake
        checked_prompts = [self._checked(encoded, options) for encoded in self.encode(prompts)]
        checked = [intake.check_params(params) for params in all_params]
        return [
            self._job(request_id, prompt, media, params, unenforced, prompt_options)
            for request_id, (prompt, media), (params, unenforced), prompt_options in zip(
                ids, checked_prompts, checked, all_options, strict=True
            )
        ]

    def checked_prompt(self, prompt: Prompt, options: RequestOptions) -> tuple[TokenIds, RequestMedia | None]:
        """Return the checked token ids of a prompt, and its pictures. Raises the errors of `jobs`."""
        (encoded,) = self.encode([prompt])
        return self._checked(encoded, options)

    def _checked(self, encoded: Any, options: RequestOptions) -> tuple[TokenIds, RequestMedia | None]:
        if isinstance(encoded, MediaTokens):
            media = encoded.media
            return self._intake.check_prompt(encoded.token_ids, pooling=options.pooling, media=media), media
        return self._intake.check_prompt(encoded, pooling=options.pooling), None

    def _job(
        self,
        request_id: str,
        prompt: TokenIds,
        media: RequestMedia | None,
        params: SamplingParams,
        unenforced: tuple[str, ...],
        options: RequestOptions,
    ) -> Job:
        shown = prompt if media is None else media.shown(prompt)
        builder = OutputBuilder(request_id, shown, params, unenforced=unenforced)
        texts = {
            completion_id: CompletionText(self._text_stream(params), params.include_stop)
            for completion_id in builder.completion_ids
        }
        seed = draw_seed() if params.seed is None else params.seed
        requests = [
            self._intake.request(completion_id, prompt, params, options, index=index, seed=seed, media=media)
            for index, completion_id in enumerate(builder.completion_ids)
        ]
        return Job(builder, texts, requests)

    def encode(self, prompts: list[Prompt]) -> list[Any]:
        """Return the token ids, or the `MediaTokens`, of every prompt. All texts are tokenized in one batch.

        Raises:
            InvalidPromptError: a text is empty.
            MediaError: a picture cannot be used.
            UnsupportedFeatureError: a prompt has pictures, but the model cannot use them.
        """
        if "" in [prompt for prompt in prompts if isinstance(prompt, str)]:
            raise InvalidPromptError("the prompt is empty; give some text")
        encoded = iter(self._tokenizer.encode_batch([prompt for prompt in prompts if isinstance(prompt, str)]))
        return [next(encoded) if isinstance(p, str) else self._encode_one(p) for p in prompts]

    def _encode_one(self, prompt: Prompt) -> Any:
        if isinstance(prompt, MediaPrompt):
            if self._media is None:
                raise UnsupportedFeatureError(NO_PICTURES)
            if isinstance(prompt.prompt, str):
                return self._media.encode_text(prompt.prompt, prompt.images)
            return self._media.encode_ids(prompt.prompt, prompt.images)
        if not is_chat(prompt):
            return prompt
        chat = check_chat(prompt)
        if self._media is not None:
            return self._media.encode_chat(chat, {})
        if has_media(chat):
            raise UnsupportedFeatureError(NO_PICTURES)
        return self._tokenizer.encode_chat(chat)


def _params_of_each(sampling_params: Params | Sequence[Params], num_prompts: int) -> list[SamplingParams]:
    """Return one SamplingParams per prompt."""
    if sampling_params is None or isinstance(sampling_params, SamplingParams | Mapping):
        return [_params(sampling_params)] * num_prompts
    if len(sampling_params) != num_prompts:
        raise SamplingParamsError(
            f"sampling_params: got {len(sampling_params)}, expected one for each of {num_prompts} prompts"
        )
    return [_params(p) for p in sampling_params]


def _params(value: Params) -> SamplingParams:
    if isinstance(value, SamplingParams):
        return value
    if value is None:
        return SamplingParams()
    try:
        return SamplingParams(**value)
    except TypeError as error:
        message = str(error).replace("SamplingParams.__init__() ", "")
        raise SamplingParamsError(f"sampling_params: {message}") from None


def _adapter_of_each(value: Adapters, num_prompts: int) -> list[str | None]:
    """Return the name of each prompt's adapter."""
    names: list[Any] = list(value) if isinstance(value, list | tuple) else [value] * num_prompts
    if not all(name is None or isinstance(name, str) for name in names):
        raise RequestError(f"adapter must be an adapter's name, None, or a list of these, got {value!r:.200}")
    if len(names) != num_prompts:
        raise RequestError(f"adapter: got {len(names)} names, expected one for each of {num_prompts} prompt(s)")
    return names
