"""Builds the outputs for users from the scheduler's updates."""

from dataclasses import dataclass
from functools import cached_property

from graftlm.scheduling import CompletionId, Finish, RequestUpdate
from graftlm.tokenization import TextStream
from graftlm.types import (
    Completion,
    FinishReason,
    PromptLogprobs,
    RequestOutput,
    SamplingParams,
    Timings,
    TokenIds,
    TokenLogprob,
    Usage,
)

__all__ = ["CompletionText", "GatheredOutput", "OutputBuilder", "completion_ids"]


class CompletionText:
    """Builds the text of one completion from its updates."""

    def __init__(self, stream: TextStream, include_stop: bool) -> None:
        self._stream = stream
        self._keeps_stop = include_stop

    def push(self, update: RequestUpdate) -> str:
        """Return the text that an update adds."""
        finish = update.finish
        if update.forced_text:
            return self._stream.jump(update.num_dropped, update.token_ids, update.forced_text).text
        if finish is None:
            return self._stream.push(update.token_ids).text
        visible = update.token_ids
        if isinstance(finish.matched_stop, int) and not self._keeps_stop:
            visible = visible[:-1]  # the text does not contain the stop token, as it does not contain a stop string
        return self._stream.push(visible).text + self._stream.finish()


class _CompletionBuilder:
    """Collects the updates of one completion."""

    def __init__(self, index: int, params: SamplingParams) -> None:
        self.index = index
        self.finish: Finish | None = None
        self.cached_tokens = self.cached_host_tokens = self.cached_storage_tokens = 0
        self.timings = Timings()
        self.token_ids: list[int] = []
        self.jump_forward_tokens = 0
        self.drafted_tokens = 0
        self.accepted_draft_tokens = 0
        self._logprobs: list[TokenLogprob] | None = None if params.logprobs is None else []
        self._text: list[str] = []

    def apply(self, update: RequestUpdate, text: str) -> None:
        del self.token_ids[len(self.token_ids) - update.num_dropped :]
        self.token_ids += update.token_ids
        self.jump_forward_tokens += len(update.token_ids) - update.num_dropped if update.forced_text else 0
        if self._logprobs is not None:
            self._logprobs += update.logprobs
        self.cached_tokens = update.cached_tokens
        self.cached_host_tokens = update.cached_host_tokens
        self.cached_storage_tokens = update.cached_storage_tokens
        self.timings = Timings(update.queue_s, update.first_token_s, update.total_s)
        self.finish = update.finish
        if update.usage is not None:
            self.drafted_tokens = update.usage.drafted_tokens
            self.accepted_draft_tokens = update.usage.accepted_draft_tokens
        self._text.append(text)

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
            jump_forward_tokens=self.jump_forward_tokens,
            drafted_tokens=self.drafted_tokens,
            accepted_draft_tokens=self.accepted_draft_tokens,
        )


@dataclass(frozen=True, slots=True)
class GatheredOutput:
    """The output so far, without the prompt: converting a long prompt to a tuple would take milliseconds.

    Attributes:
        prompt_logprobs: see `RequestOutput`.
    """

    completions: tuple[Completion, ...]
    usage: Usage
    timings: Timings
    prompt_logprobs: PromptLogprobs | None = None


class OutputBuilder:
    """Collects the completions of one prompt.

    Attributes:
        completion_ids: ids of the completions, in order of their indices.
        embedding: float32 [hidden] as bytes; None until a pooling request has ended.
    """

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: TokenIds,
        params: SamplingParams,
        base_id: str | None = None,
        unenforced: tuple[str, ...] = (),
    ) -> None:
        """Create a builder without updates.

        Args:
            base_id: id from which the completions' ids are derived; None: `request_id`.
            unenforced: see `RequestOutput`.
        """
        self._unenforced = unenforced
        self.request_id = request_id
        self.completion_ids = completion_ids(request_id if base_id is None else base_id, params.n)
        self.embedding: bytes | None = None
        self._prompt = prompt_token_ids
        self._completions = {
            completion_id: _CompletionBuilder(i, params) for i, completion_id in enumerate(self.completion_ids)
        }
        self._prompt_logprobs: list[TokenLogprob | None] | None = None
        if params.prompt_logprobs is not None:
            self._prompt_logprobs = [None] * min(max(params.prompt_logprobs_start, 1), len(prompt_token_ids))

    @property
    def finished(self) -> bool:
        """Whether every completion has ended."""
        return all(c.finish is not None for c in self._completions.values())

    @property
    def aborted(self) -> bool:
        """Whether a completion was aborted."""
        return any(c.finish and c.finish.reason is FinishReason.ABORT for c in self._completions.values())

    @cached_property
    def _prompt_token_ids(self) -> tuple[int, ...]:
        return tuple(self._prompt.tolist())  # computed once for all outputs of a stream

    def apply(self, update: RequestUpdate, text: str) -> None:
        """Add an update of one completion, with its new text."""
        self._completions[update.request_id].apply(update, text)
        self.embedding = update.embedding or self.embedding
        if self._prompt_logprobs is not None and update.request_id == self.completion_ids[0]:
            self._prompt_logprobs += update.prompt_logprobs

    def output(self) -> RequestOutput:
        """Return everything gathered so far, and the prompt."""
        gathered = self.gathered()
        return RequestOutput(
            request_id=self.request_id,
            prompt_token_ids=self._prompt_token_ids,
            completions=gathered.completions,
            usage=gathered.usage,
            timings=gathered.timings,
            prompt_logprobs=gathered.prompt_logprobs,
            unenforced=self._unenforced,
        )

    @property
    def usage(self) -> Usage:
        """The token counts of all completions so far."""
        builders = list(self._completions.values())
        num_output_tokens = sum(len(b.token_ids) for b in builders)
        first = builders[0]
        lower = first.cached_host_tokens, first.cached_storage_tokens
        num_forced = sum(b.jump_forward_tokens for b in builders)
        drafted = sum(b.drafted_tokens for b in builders), sum(b.accepted_draft_tokens for b in builders)
        return Usage(len(self._prompt), num_output_tokens, first.cached_tokens, *lower, num_forced, *drafted)

    def gathered(self) -> GatheredOutput:
        """Return everything gathered so far."""
        builders = list(self._completions.values())
        return GatheredOutput(
            completions=tuple([b.completion() for b in builders]),
            usage=self.usage,
            timings=_merge([b.timings for b in builders]),
            prompt_logprobs=None if self._prompt_logprobs is None else tuple(self._prompt_logprobs),
        )


def completion_ids(base_id: str, num_completions: int) -> list[CompletionId]:
    """Return the ids of a prompt's completions: `base_id` if there is one completion, else "id#0", "id#1" and so on."""
    if num_completions == 1:
        return [CompletionId(base_id)]
    return [CompletionId(f"{base_id}#{i}") for i in range(num_completions)]


def _merge(timings: list[Timings]) -> Timings:
    """Return a prompt's timings, from the first token of any completion and the end of the last completion."""
    first = [t.first_token_s for t in timings if t.first_token_s is not None]
    total = [t.total_s for t in timings if t.total_s is not None]
    return Timings(timings[0].queue_s, min(first, default=None), max(total) if len(total) == len(timings) else None)
