"""From the scheduler's updates to what users see."""

from collections.abc import Callable
from functools import cached_property

from graftlm.scheduling import Finish, RequestUpdate
from graftlm.tokenization import TextStream
from graftlm.types import (
    Completion,
    FinishReason,
    RequestOutput,
    SamplingParams,
    Timings,
    TokenIds,
    TokenLogprob,
    Usage,
)

__all__ = ["OutputBuilder"]


class _CompletionBuilder:
    """Gathers one completion."""

    def __init__(self, index: int, params: SamplingParams, text_stream: TextStream) -> None:
        self.index = index
        self.finish: Finish | None = None
        self.cached_tokens = 0
        self.timings = Timings()
        self.token_ids: list[int] = []
        self._keeps_stop = params.include_stop
        self._logprobs: list[TokenLogprob] | None = None if params.logprobs is None else []
        self._text_stream = text_stream
        self._text: list[str] = []

    def apply(self, update: RequestUpdate) -> None:
        self.token_ids += update.token_ids
        if self._logprobs is not None:
            self._logprobs += update.logprobs
        self.cached_tokens = update.cached_tokens
        self.timings = Timings(update.queue_s, update.first_token_s, update.total_s)
        visible = list(update.token_ids)
        if update.finish is not None:
            self.finish = update.finish
            if isinstance(update.finish.matched_stop, int) and not self._keeps_stop:
                visible = visible[:-1]  # a stop token ends the text as a stop string does: it is not part of it
        self._text.append(self._text_stream.push(visible).text)
        if update.finish is not None:
            self._text.append(self._text_stream.finish())

    def completion(self) -> Completion:
        if len(self._text) > 1:
            self._text = ["".join(self._text)]
        finish = self.finish
        return Completion(
            index=self.index,
            text="".join(self._text),
            token_ids=tuple(self.token_ids),
            finish_reason=None if finish is None else finish.reason,
            matched_stop=None if finish is None else finish.matched_stop,
            error=None if finish is None else finish.error,
            logprobs=None if self._logprobs is None else tuple(self._logprobs),
        )


class OutputBuilder:
    """Gathers the completions of one prompt. Detokenises in the thread of whoever applies the updates."""

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: TokenIds,
        params: SamplingParams,
        make_text_stream: Callable[[SamplingParams], TextStream],
    ) -> None:
        self.request_id = request_id
        self.sub_ids = [request_id] if params.n == 1 else [f"{request_id}#{i}" for i in range(params.n)]
        self._prompt = prompt_token_ids
        self._completions = {
            sub_id: _CompletionBuilder(i, params, make_text_stream(params)) for i, sub_id in enumerate(self.sub_ids)
        }
        self._prompt_logprobs: list[TokenLogprob | None] | None = None if params.prompt_logprobs is None else [None]

    @property
    def finished(self) -> bool:
        """Whether every completion has ended."""
        return all(c.finish is not None for c in self._completions.values())

    @property
    def aborted(self) -> bool:
        """Whether a completion ended by an abort."""
        return any(c.finish and c.finish.reason is FinishReason.ABORT for c in self._completions.values())

    @cached_property
    def _prompt_token_ids(self) -> tuple[int, ...]:
        return tuple(self._prompt.tolist())  # once for all outputs of a stream

    def apply(self, update: RequestUpdate) -> None:
        """Add an update of one of the completions."""
        self._completions[update.request_id].apply(update)
        if self._prompt_logprobs is not None and update.request_id == self.sub_ids[0]:
            self._prompt_logprobs += update.prompt_logprobs

    def output(self) -> RequestOutput:
        """Return everything gathered so far."""
        builders = list(self._completions.values())
        num_output_tokens = sum(len(b.token_ids) for b in builders)
        usage = Usage(len(self._prompt), num_output_tokens, builders[0].cached_tokens)
        return RequestOutput(
            request_id=self.request_id,
            prompt_token_ids=self._prompt_token_ids,
            completions=tuple([b.completion() for b in builders]),
            usage=usage,
            timings=_merge([b.timings for b in builders]),
            prompt_logprobs=None if self._prompt_logprobs is None else tuple(self._prompt_logprobs),
        )


def _merge(timings: list[Timings]) -> Timings:
    """Return when the first completion started and when the last one ended."""
    first = [t.first_token_s for t in timings if t.first_token_s is not None]
    total = [t.total_s for t in timings if t.total_s is not None]
    return Timings(timings[0].queue_s, min(first, default=None), max(total) if len(total) == len(timings) else None)
