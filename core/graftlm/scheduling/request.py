"""One request's state, from its arrival to its end."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NewType, Protocol

import numpy as np
from numpy.typing import NDArray

from graftlm.contracts import PrefetchTicket, PrefixKey
from graftlm.errors import InvariantError
from graftlm.lora.adapters import BASE_SLOT, LoadedAdapter
from graftlm.media.request_media import RequestMedia
from graftlm.plan import RowSetup
from graftlm.pooling.pooling import Pooling
from graftlm.scheduling.grammar import RequestGrammar
from graftlm.types import SamplingParams, TokenIds, Usage

__all__ = ["CompletionId", "Request", "RequestStatus", "StopWatch"]

#: The id of one of a prompt's `n` completions. The scheduler treats each completion as a request.
CompletionId = NewType("CompletionId", str)


class RequestStatus(Enum):
    """The state of a request."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class StopWatch(Protocol):
    """Watches one completion's text for stop strings."""

    def push(self, token_ids: Sequence[int]) -> object:
        """Append tokens."""
        ...

    def jump(self, num_dropped: int, token_ids: Sequence[int], text: str) -> object:
        """Replace the latest `num_dropped` tokens by `token_ids`, which add `text`; `text` completes no stop string."""
        ...

    @property
    def matched(self) -> str | None:
        """The stop string that the text so far contains; None if it contains none."""
        ...


@dataclass(slots=True, eq=False)
class Request:
    """One completion of a prompt: the prompt, its parameters, and its state.

    Attributes:
        prompt_token_ids: int32 [n]; ids below 0 stand for features of pictures.
        max_new_tokens: maximum number of tokens to generate, already limited by context and memory. Zero for a pooling
            request.
        stop_token_ids: tokens that end the request. They include the model's end-of-sequence tokens unless
            `ignore_eos`.
        seed: seed of the request's noise.
        deadline_s: clock reading at which the request times out; None: never.
        stop_watch: watches the text if the request has stop strings, else None.
        grammar: the grammar if the output is constrained, else None; it has accepted exactly the committed output.
        num_in_flight: number of steps with the request that are planned and not committed.
        queue_number: number of requests queued before this request; it orders requests that arrive at the same time.
        passed_over_s: clock reading at which a later request was first admitted before this request; None: not yet.
        is_aged: whether the request was passed over for so long that it is admitted first.
        jump_forward_tokens: number of output tokens that the grammar forced, and that were not sampled.
        drafted_tokens: number of drafted tokens that a step verified.
        accepted_draft_tokens: number of drafted tokens that became output.
        valid_from_step: id of the first step whose samples are used. Samples of earlier steps are dropped, because the
            output was changed after they were planned.
        cached_tokens: number of prompt tokens found in the cache, counted until the first retraction.
        cached_host_tokens, cached_storage_tokens: numbers of `cached_tokens` that were loaded from each lower tier.
        prefetch: ticket of the prefetch from storage to host memory, while the request waits.
        pooling: how the prompt's vector is computed; None for requests that generate tokens. A pooling request samples
            no token, and ends when its prompt is computed.
        adapter: the LoRA adapter, or None. `namespace` separates the cached prefixes of different adapters.
        media: the pictures of the prompt, or None.
        num_reads_planned, num_reads_reported: the logits or hidden states of prompt positions from `first_read` on are
            results of the request. These are the numbers of positions that steps have been planned to read, and that
            steps have returned.
        prompt_len: number of tokens of the prompt.
        num_tokens: number of tokens whose values are known on the host: the prompt and the committed output.
        max_len: maximum number of tokens of prompt and output.
        is_watched: whether the request has stop strings or a grammar. The text of a token may then end the request or
            force further tokens.
    """

    request_id: CompletionId
    prompt_token_ids: TokenIds
    params: SamplingParams
    max_new_tokens: int
    stop_token_ids: frozenset[int]
    seed: int
    arrival_s: float
    namespace: str = ""
    priority: int = 0
    deadline_s: float | None = None
    stop_watch: StopWatch | None = None
    grammar: RequestGrammar | None = None
    pooling: Pooling | None = None
    adapter: LoadedAdapter | None = None
    media: RequestMedia | None = None

    status: RequestStatus = RequestStatus.WAITING
    row: int | None = None
    num_in_flight: int = 0
    cached_tokens: int = 0
    cached_host_tokens: int = 0
    cached_storage_tokens: int = 0
    jump_forward_tokens: int = 0
    drafted_tokens: int = 0
    accepted_draft_tokens: int = 0
    valid_from_step: int = 0
    num_retractions: int = 0
    queue_number: int = 0
    passed_over_s: float | None = None
    is_aged: bool = False
    admitted_s: float | None = None
    first_token_s: float | None = None
    finished_s: float | None = None
    num_reads_planned: int = 0
    num_reads_reported: int = 0
    prefetch: PrefetchTicket | None = None
    _pooled: NDArray[np.float64] | None = None
    prompt_len: int = field(init=False)
    num_tokens: int = field(init=False)
    max_len: int = field(init=False)
    is_watched: bool = field(init=False)
    _tokens: TokenIds = field(init=False)

    def __post_init__(self) -> None:
        self.prompt_len = self.num_tokens = len(self.prompt_token_ids)
        self.max_len = self.prompt_len + self.max_new_tokens
        self.is_watched = self.stop_watch is not None or self.grammar is not None
        self._tokens = self.prompt_token_ids

    @property
    def shown_prompt(self) -> TokenIds:
        """The prompt with the model's feature token in place of placeholder ids, int32 [n]."""
        return self.prompt_token_ids if self.media is None else self.media.shown(self.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Number of committed output tokens."""
        return self.num_tokens - self.prompt_len

    @property
    def token_ids(self) -> TokenIds:
        """Read-only view of prompt and committed output, int32 [num_tokens]."""
        view = self._tokens[: self.num_tokens]
        view.flags.writeable = False
        return view

    @property
    def output_token_ids(self) -> TokenIds:
        """View of the committed output, int32 [num_output_tokens]."""
        return self._tokens[len(self.prompt_token_ids) : self.num_tokens]

    @property
    def reusable_len(self) -> int:
        """Number of leading tokens that may come from the cache: the tokens before the next position to read.

        If no prompt position is left to read, the next position to read is the last token, because sampling reads its
        logits.
        """
        if self.num_reads_planned < self.num_reads:
            return self.first_read + self.num_reads_planned
        return self.num_tokens - 1

    @property
    def first_read(self) -> int:
        """The first prompt position to read. The logits for a token's log-probability are at the position before it."""
        if self.pooling is not None:
            return 0
        return min(max(self.params.prompt_logprobs_start - 1, 0), self.prompt_len - 1)

    @property
    def num_reads(self) -> int:
        """Number of prompt positions from `first_read` on whose logits or hidden states are read."""
        if self.pooling is not None:
            return self.prompt_len if self.pooling.reads_all else 0
        return 0 if self.params.prompt_logprobs is None else self.prompt_len - 1 - self.first_read

    @property
    def held_row(self) -> int:
        """The request's row; only running requests have one."""
        if self.row is None:
            raise InvariantError(f"request {self.request_id} is {self.status.value} and holds no row")
        return self.row

    @property
    def adapter_slot(self) -> int:
        """The slot of the request's adapter; `BASE_SLOT` if the request has no adapter."""
        return BASE_SLOT if self.adapter is None else self.adapter.slot

    @property
    def seniority(self) -> tuple[float, int]:
        """A sort key for the order of arrival; it never changes."""
        return self.arrival_s, self.queue_number

    def can_be_admitted(self, now: float) -> bool:
        """Return whether the request may be admitted now.

        A request may not be admitted while a step with the request is in flight, its grammar is being compiled, or it
        waits for its prefetch.
        """
        is_ready = not self.num_in_flight and (self.grammar is None or self.grammar.is_ready)
        return is_ready and not self.awaits_prefetch(now)

    @property
    def usage(self) -> Usage:
        """The request's token counts so far."""
        lower = self.cached_host_tokens, self.cached_storage_tokens
        drafted = self.drafted_tokens, self.accepted_draft_tokens
        forced = self.jump_forward_tokens
        return Usage(self.prompt_len, self.num_output_tokens, self.cached_tokens, *lower, forced, *drafted)

    def awaits_prefetch(self, now: float) -> bool:
        """Return whether the request still waits for its prefetch."""
        ticket = self.prefetch
        return ticket is not None and not ticket.done and (ticket.deadline_s is None or now < ticket.deadline_s)

    def append(self, token_id: int) -> None:
        """Commit one sampled token."""
        if self.num_tokens == len(self._tokens):
            grown = np.empty(min(2 * self.num_tokens + 16, self.max_len + 1), dtype=np.int32)
            grown[: self.num_tokens] = self._tokens
            self._tokens = grown
        self._tokens[self.num_tokens] = token_id
        self.num_tokens += 1

    def replace_latest(self, num_dropped: int, token_ids: Sequence[int]) -> None:
        """Replace the latest tokens. Cache keys that were created before the call still have the old tokens."""
        if num_dropped:
            self.num_tokens -= num_dropped
            self._tokens = self._tokens[: self.num_tokens].copy()
        for token_id in token_ids:
            self.append(token_id)

    def add_pooled(self, hidden: NDArray[np.float32], num_tokens: int) -> None:
        """Add the sum of the hidden states of further prompt positions, float32 [n]."""
        self._pooled = hidden.astype(np.float64) if self._pooled is None else self._pooled + hidden
        self.num_reads_reported += num_tokens

    @property
    def pooled(self) -> NDArray[np.float32]:
        """The prompt's vector, float32 [n]; available after all positions have been added."""
        if self._pooled is None:
            raise InvariantError(f"request {self.request_id} ends without its hidden states")
        num_tokens = self.prompt_len if self.pooling is not None and self.pooling.reads_all else 1
        return (self._pooled / num_tokens).astype(np.float32)

    def uses_sample_of(self, step_id: int) -> bool:
        """Return whether a step's sample is used: the request has not ended, and its output has not been replaced."""
        return self.status is not RequestStatus.FINISHED and step_id >= self.valid_from_step

    def reads(self, start: int, end: int) -> range:
        """Return the positions in start : end whose logits or hidden states no planned step reads yet."""
        if self.pooling is not None and not self.pooling.reads_all:
            return range(max(start, self.prompt_len - 1), end)
        first = max(start, self.first_read + self.num_reads_planned)
        return range(first, max(first, min(end, self.first_read + self.num_reads)))

    def key(self, num_tokens: int) -> PrefixKey:
        """Return the cache key of the request's first `num_tokens` tokens."""
        return PrefixKey(self._tokens[:num_tokens], self.namespace, self.priority)

    def reusable_key(self) -> PrefixKey:
        """Return the cache key of the first `reusable_len` tokens."""
        return self.key(self.reusable_len)

    def setup(self, row: int) -> RowSetup:
        """Return the sampler's parameters for the request in its new row."""
        return RowSetup(
            row=row,
            request_id=self.request_id,
            params=self.params,
            seed=self.seed,
            prompt_token_ids=self.shown_prompt,
            output_token_ids=self.output_token_ids.copy(),
            stop_token_ids=tuple(self.stop_token_ids),
        )
