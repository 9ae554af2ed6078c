"""One running prompt in the main process, with the output that its HTTP handler reads."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from itertools import chain

from graftlm.errors import GraftlmError, GrammarError, RequestError, RequestFailedError, RequestTimeoutError
from graftlm.media import MediaTokens
from graftlm.outputs import GatheredOutput, OutputBuilder
from graftlm.processes.messages import PromptId
from graftlm.request_options import DEFAULT_OPTIONS, RequestOptions
from graftlm.scheduling import CompletionId, Failure, Finish, RequestUpdate
from graftlm.types import FinishReason, RequestOutput, SamplingParams, TokenIds, TokenLogprob, Usage

__all__ = ["CompletionDelta", "Generation", "PreparedRequest"]


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A tokenized and checked prompt that can be started.

    Attributes:
        request_id: the client's id, or a random one.
        prompt_token_ids: int32 [n], with the model's feature token in place of placeholder ids.
        params: the sampling parameters.
        seed: the seed of all completions of the prompt.
        options: options other than sampling parameters, such as timeout and priority.
        unenforced: value of `RequestOutput.unenforced`.
        media: the prompt with placeholder ids, and its pictures; None: no pictures.
    """

    request_id: str
    prompt_token_ids: TokenIds
    params: SamplingParams
    seed: int
    options: RequestOptions = DEFAULT_OPTIONS
    unenforced: tuple[str, ...] = ()
    media: MediaTokens | None = None

    @property
    def key_token_ids(self) -> TokenIds:
        """The prompt's token ids in prefix caches, int32 [n]: with placeholder ids below 0 for pictures."""
        return self.prompt_token_ids if self.media is None else self.media.token_ids


@dataclass(frozen=True, slots=True)
class CompletionDelta:
    """The new part of one completion.

    Attributes:
        index: index of the completion.
        text: new text, possibly "".
        token_ids: new tokens, possibly none.
        logprobs: one value per new token if requested, else empty.
        num_dropped: number of the completion's last tokens that the new tokens replace. Earlier text does not change.
        finish_reason, matched_stop: set only in the completion's last delta.
    """

    index: int
    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    num_dropped: int = 0
    finish_reason: FinishReason | None = None
    matched_stop: str | int | None = None


class Generation(AsyncIterator[list[CompletionDelta]]):
    """The output of one running prompt. Only one reader may read it, in the manager's event loop.

    Iterate over this object to get deltas when they arrive, or await `result`. If a completion is aborted, its
    finish_reason is "abort". If a completion fails, the iteration yields the earlier deltas and then raises an error;
    `result` raises the same error:

        RequestError: the request is not valid, or uses an unsupported feature.
        RequestTimeoutError: the request exceeded its time limit.
        RequestFailedError: the engine failed.
        UnavailableError: a process died. The client may send the request again.

    Args:
        request: the prompt.
        prompt_id: the prompt's id in messages between processes.
        abort: called to abort this generation.

    Attributes:
        request: the prompt.
        accepted: future that is done when a replica has queued or refused the prompt.
        num_output_tokens: number of tokens of all completions so far.
        num_unfinished: number of completions that have not ended.
        outcome: a finish reason or the name of a failure, for metrics.
        weight_version: name of the weights at the start of the request.
    """

    def __init__(
        self,
        request: PreparedRequest,
        prompt_id: PromptId,
        abort: Callable[["Generation"], None],
        weight_version: str = "default",
    ) -> None:
        self.request = request
        self.weight_version = weight_version
        self.accepted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.num_output_tokens = 0
        self._builder = OutputBuilder(
            request.request_id, request.prompt_token_ids, request.params, prompt_id, request.unenforced
        )
        self._index = {completion_id: i for i, completion_id in enumerate(self._builder.completion_ids)}
        self.num_unfinished = len(self._index)
        self.outcome = "abort"
        self._deltas: list[CompletionDelta] = []
        self._changed = asyncio.Event()
        self._error: GraftlmError | None = None
        self._abort = abort

    @property
    def request_id(self) -> str:
        """The prompt's request id."""
        return self.request.request_id

    @property
    def embedding(self) -> bytes | None:
        """The vector of an embedding request, float32 [hidden] as bytes; None before the end and for other requests."""
        return self._builder.embedding

    @property
    def completion_ids(self) -> list[CompletionId]:
        """The ids of the completions, in the order of their indices."""
        return self._builder.completion_ids

    @property
    def finished(self) -> bool:
        """Whether every completion has ended, or the request has failed."""
        return self.num_unfinished == 0 or self._error is not None

    @property
    def failed(self) -> bool:
        """Whether the request has failed, so that reading to the end raises an error."""
        return self._error is not None

    @property
    def usage(self) -> Usage:
        """The token counts so far."""
        return self._builder.usage

    def gathered(self) -> GatheredOutput:
        """Return all output so far, without the prompt, which is in `request`."""
        return self._builder.gathered()

    def snapshot(self) -> RequestOutput:
        """Return all output so far, and the prompt's token ids as a tuple. For a long prompt, this takes milliseconds.

        Use `gathered` if the prompt's token ids are not needed.
        """
        return self._builder.output()

    async def ended(self) -> GatheredOutput:
        """Wait for the end and return all output. Raises the errors that the docstring of the class lists."""
        async for _ in self:
            pass
        return self.gathered()

    async def result(self) -> RequestOutput:
        """Wait for the end and return all output with the prompt. Raises the errors of `ended`."""
        await self.ended()
        return self.snapshot()

    def abort(self) -> None:
        """Abort the prompt if it has not ended. Its completions then end with finish_reason "abort"."""
        if not self.finished:
            self._abort(self)

    async def __anext__(self) -> list[CompletionDelta]:
        """Wait for new output, and return one delta for each completion with new output."""
        while True:
            if self._deltas:
                deltas, self._deltas = self._deltas, []
                return deltas if len(deltas) == 1 else _merged(deltas)
            if self._error is not None:
                raise self._error
            if self.num_unfinished == 0:
                raise StopAsyncIteration
            self._changed.clear()
            await self._changed.wait()

    # -- for the tokenizer manager -------------------------------------------------------------------------------------

    def apply(self, update: RequestUpdate, text: str) -> None:
        """Add an update of one of the completions, with its text."""
        if self._error is not None:
            return
        if not self.accepted.done():
            self.accepted.set_result(None)  # the update, sent through the detokenizer, was faster than Accepted
        self._builder.apply(update, text)
        finish = update.finish
        self.num_output_tokens += len(update.token_ids) - update.num_dropped
        if finish is not None:
            self.num_unfinished -= 1
            self.outcome = (finish.failure or finish.reason).value
            failed = _error_of(finish)
            if failed is not None:
                self.fail(failed)
                return
        self._deltas.append(
            CompletionDelta(
                index=self._index[update.request_id],
                text=text,
                token_ids=update.token_ids,
                logprobs=update.logprobs,
                num_dropped=update.num_dropped,
                finish_reason=None if finish is None else finish.reason,
                matched_stop=None if finish is None else finish.matched_stop,
            )
        )
        self._changed.set()

    def fail(self, error: GraftlmError) -> None:
        """End the prompt with an error."""
        if self._error is None:
            self._error = error
            if not self.accepted.done():
                self.accepted.set_exception(error)
                self.accepted.exception()  # otherwise asyncio logs an error that no caller has retrieved
            self._changed.set()


def _merged(deltas: list[CompletionDelta]) -> list[CompletionDelta]:
    """Return one delta per completion. It contains all deltas of the completion."""
    by_index: dict[int, list[CompletionDelta]] = {}
    for delta in deltas:
        by_index.setdefault(delta.index, []).append(delta)
    return [_join(parts) for parts in by_index.values()]


def _join(parts: list[CompletionDelta]) -> CompletionDelta:
    last = parts[-1]
    token_ids: list[int] = []
    num_dropped = 0
    for part in parts:
        num_dropped += max(0, part.num_dropped - len(token_ids))
        del token_ids[max(0, len(token_ids) - part.num_dropped) :]
        token_ids += part.token_ids
    return CompletionDelta(
        index=last.index,
        text="".join([part.text for part in parts]),
        token_ids=tuple(token_ids),
        num_dropped=num_dropped,
        logprobs=tuple(chain.from_iterable(part.logprobs for part in parts)),
        finish_reason=last.finish_reason,
        matched_stop=last.matched_stop,
    )


def _error_of(finish: Finish) -> GraftlmError | None:
    """Return the error of a failed request; None if the request has succeeded or was aborted."""
    message = finish.error or finish.reason.value
    if finish.failure is Failure.TIMEOUT:
        return RequestTimeoutError(f"the request {message}")
    if finish.failure is Failure.REQUEST:
        return RequestError(message)
    if finish.failure is Failure.GRAMMAR:
        return GrammarError(message)
    if finish.failure is Failure.ENGINE:
        return RequestFailedError(message)
    return None
