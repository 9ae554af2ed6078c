"""One prompt under way in the server: what the other processes report of it, as its handler reads it."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from itertools import chain

from graftlm.errors import GraftlmError, GrammarError, RequestError, RequestFailedError, RequestTimeoutError
from graftlm.outputs import GatheredOutput, OutputBuilder
from graftlm.processes.messages import PromptId
from graftlm.request_options import DEFAULT_OPTIONS, RequestOptions
from graftlm.scheduling import CompletionId, Failure, Finish, RequestUpdate
from graftlm.types import FinishReason, RequestOutput, SamplingParams, TokenIds, TokenLogprob, Usage

__all__ = ["CompletionDelta", "Generation", "PreparedRequest"]


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A prompt that has been tokenised and checked, and can be started.

    Attributes:
        request_id: as the client gave it, or drawn.
        prompt_token_ids: int32 [n].
        seed: of all its completions.
        unenforced: as of `RequestOutput`.
    """

    request_id: str
    prompt_token_ids: TokenIds
    params: SamplingParams
    seed: int
    options: RequestOptions = DEFAULT_OPTIONS
    unenforced: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CompletionDelta:
    """What one update brought to one completion.

    Attributes:
        text: new text, possibly "".
        token_ids: new tokens, possibly none.
        logprobs: one per new token when asked for.
        num_dropped: how many of the latest tokens before the new ones replace; no text goes with them.
        finish_reason, matched_stop: set on the completion's last delta.
    """

    index: int
    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    num_dropped: int = 0
    finish_reason: FinishReason | None = None
    matched_stop: str | int | None = None


class Generation(AsyncIterator[list[CompletionDelta]]):
    """What has come of a prompt so far, and what is new. Belongs to one event loop and has one reader.

    Iterate for deltas as they come, or await `result`. A completion that is aborted ends with finish_reason "abort";
    one that fails raises, in either way of reading, after the deltas before it:

        RequestError: the request asked for what cannot be done.
        RequestTimeoutError: its time was over.
        RequestFailedError: the engine failed it.
        UnavailableError: a process died; the request may be sent again.

    Attributes:
        request: what was started.
        accepted: done when a replica has queued it, or refused it.
        num_output_tokens: of all completions, so far.
        num_unfinished: completions that have not ended.
        outcome: how it ended, for metrics: a finish reason, or a failure's name.
        weight_version: the name of the weights that it began with.
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
        self._news = asyncio.Event()
        self._error: GraftlmError | None = None
        self._abort = abort

    @property
    def request_id(self) -> str:
        """The client's id of the prompt."""
        return self.request.request_id

    @property
    def embedding(self) -> bytes | None:
        """float32 [hidden] as bytes, once a request for one has ended."""
        return self._builder.embedding

    @property
    def completion_ids(self) -> list[CompletionId]:
        """The ids of its completions, in the order of their indices."""
        return self._builder.completion_ids

    @property
    def finished(self) -> bool:
        """Whether every completion has ended, or the request has failed."""
        return self.num_unfinished == 0 or self._error is not None

    @property
    def failed(self) -> bool:
        """Whether reading it to the end raises."""
        return self._error is not None

    @property
    def usage(self) -> Usage:
        """The token counts so far."""
        return self._builder.usage

    def gathered(self) -> GatheredOutput:
        """Return everything so far; the prompt is in `request`."""
        return self._builder.gathered()

    def snapshot(self) -> RequestOutput:
        """Return everything so far, with the prompt's token ids as a tuple: ms for a long prompt."""
        return self._builder.output()

    async def ended(self) -> GatheredOutput:
        """Wait for the end and return everything; raises as the class says."""
        async for _ in self:
            pass
        return self.gathered()

    async def result(self) -> RequestOutput:
        """Wait for the end and return everything, with the prompt; see `snapshot`."""
        await self.ended()
        return self.snapshot()

    def abort(self) -> None:
        """End it, if it has not ended; a reader then sees finish_reason "abort"."""
        if not self.finished:
            self._abort(self)

    async def __anext__(self) -> list[CompletionDelta]:
        """Return what is new, as soon as there is something: one delta for each completion that has news."""
        while True:
            if self._deltas:
                deltas, self._deltas = self._deltas, []
                return deltas if len(deltas) == 1 else _merged(deltas)
            if self._error is not None:
                raise self._error
            if self.num_unfinished == 0:
                raise StopAsyncIteration
            self._news.clear()
            await self._news.wait()

    # -- for the tokenizer manager -------------------------------------------------------------------------------------

    def apply(self, update: RequestUpdate, text: str) -> None:
        """Take in an update of one of its completions."""
        if self._error is not None:
            return
        if not self.accepted.done():
            self.accepted.set_result(None)  # its news came by another way, and was faster
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
        self._news.set()

    def fail(self, error: GraftlmError) -> None:
        """End it with an error."""
        if self._error is None:
            self._error = error
            if not self.accepted.done():
                self.accepted.set_exception(error)
                self.accepted.exception()  # counts as seen, should its waiter have left
            self._news.set()


def _merged(deltas: list[CompletionDelta]) -> list[CompletionDelta]:
    """Join the deltas of each completion."""
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
    """Return what a failed request raises; None for one that ended as it should, or was aborted."""
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
