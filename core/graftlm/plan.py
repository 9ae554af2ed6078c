"""Plain data that the scheduler and the runner exchange, built once by the sender.

They identify a running request by its row, an index into the request table. The request has the same row from its
admission until it finishes or is retracted.
"""

from concurrent.futures import Future
from dataclasses import dataclass, field

import msgspec
import numpy as np
from numpy.typing import NDArray

from graftlm.contracts.state import StateSegments
from graftlm.contracts.transfer import StepCopies
from graftlm.media.request_media import MediaItem
from graftlm.pooling.pooling import Pooling
from graftlm.types import SamplingParams, TokenIds

__all__ = [
    "FeatureSpan",
    "LateMask",
    "LogprobTable",
    "MediaResult",
    "MediaWork",
    "PoolSpan",
    "PromptLogprobSpan",
    "RowSetup",
    "StepPlan",
    "StepResult",
    "TokenMask",
    "WindowTables",
]


@dataclass(frozen=True, slots=True)
class RowSetup:
    """The sampler's parameters for a request that gets its row in this step.

    Attributes:
        seed: seed of the request's noise.
        prompt_token_ids: int32 [n], the prompt, for the repetition penalty.
        output_token_ids: int32 [m], tokens generated before the request was retracted; empty if it was not.
        stop_token_ids: tokens that must not be sampled before `min_tokens`.
    """

    row: int
    request_id: str
    params: SamplingParams
    seed: int
    prompt_token_ids: TokenIds
    output_token_ids: TokenIds
    stop_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PromptLogprobSpan:
    """Prompt positions of one request whose log-probabilities are computed.

    Attributes:
        start: index of the first token whose logits are used, among the step's T tokens.
        targets: int64 [n], the next token of each position.
        num_top: number of most likely tokens to report.
        requested: further tokens whose log-probabilities to report at each position.
    """

    row: int
    start: int
    targets: NDArray[np.int64]
    num_top: int
    requested: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class PoolSpan:
    """Prompt positions of one request whose final hidden states are pooled.

    Attributes:
        pooling: how the hidden states are pooled.
        start: index of the first position, among the step's T tokens.
        num_tokens: number of positions.
        is_last: whether the span contains the prompt's last token; the request then ends with this step.
    """

    row: int
    pooling: Pooling
    start: int
    num_tokens: int
    is_last: bool


@dataclass(frozen=True, slots=True)
class FeatureSpan:
    """Tokens of a step whose embeddings are replaced by rows of a picture's features.

    Attributes:
        key: the key of the features.
        first: the first row.
        token_idx: int64 [k], indices into T of the tokens of the rows first : first + k.
    """

    key: bytes
    first: int
    token_idx: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class MediaWork:
    """The work on pictures in a step, besides the forward pass. The runner has a queue of pictures.

    Attributes:
        drop: keys of the features to delete, or to remove from the queue; this precedes `begin`.
        begin: pictures to append to the queue.
        max_s: maximum time in seconds for which the tower computes features of queued pictures in this step. At least
            one stage of the tower is computed.
    """

    drop: tuple[bytes, ...]
    begin: tuple[MediaItem, ...]
    max_s: float


@dataclass(frozen=True, slots=True)
class TokenMask:
    """The allowed tokens of M of a step's S samples. For the other samples, all tokens are allowed.

    Attributes:
        idx: int64 [M], indices into S, ascending.
        bits: int32 [M, ceil(V / 32)], bit i of word w is token 32 w + i; at least one bit is set in each row.
    """

    idx: NDArray[np.int64]
    bits: NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class LateMask:
    """A token mask that is filled during the step's forward pass, after the previous step is committed.

    Attributes:
        idx: see `TokenMask`.
        bits: future of `TokenMask.bits`; cancelled if the step is dropped.
    """

    idx: NDArray[np.int64]
    bits: "Future[NDArray[np.int32]]" = field(default_factory=Future)

    def wait(self) -> TokenMask | None:
        """Wait for the mask and return it; None if the step's samples are not used.

        Raises:
            CancelledError: the step was dropped.
        """
        return TokenMask(self.idx, self.bits.result())


@dataclass(frozen=True, slots=True)
class WindowTables:
    """A step's page table and slots in the memory of sliding-window layers.

    Attributes:
        page_table: int32 [B, P]; entries outside the window are valid ids without meaning.
        out_slots: int64 [T].
    """

    page_table: NDArray[np.int32]
    out_slots: NDArray[np.int64]


# A struct, because one is created in each step: creating a frozen dataclass with these fields takes ten times as long.
class StepPlan(msgspec.Struct, frozen=True, eq=False):
    """One forward pass over T tokens of B requests, with samples after S of the tokens. One-token requests come first.

    A request samples after its last token. A request with n drafts also samples after the token before its first draft,
    and after each draft: its samples are n + 1 consecutive entries of S. A sample counts only if the drafts before it
    are equal to the samples at their positions.

    Attributes:
        rows: int32 [B]; if the same rows decode again, the same array object as in the previous plan.
        query_lens: int32 [B], number of tokens of each request in this step.
        seq_lens: int32 [B], context length of each request, including its tokens in this step.
        page_table: int32 [B, P], page ids; entries past a request's pages are valid ids without meaning.
        input_ids: int64 [T]; the runner inserts the rows' latest sampled tokens at `device_idx`.
        device_idx: int64 [N], indices into T.
        positions: int64 [T].
        out_slots: int64 [T].
        num_decodes: number of requests with one token; they are the first in the batch.
        sample_idx: int64 [S], indices into B of the requests that sample, ascending. A request with n drafts appears n
            + 1 times.
        sample_positions: int64 [S], positions of the sampled tokens.
        setups: parameters of rows that were allocated in this step; the runner applies them before the forward pass.
        prompt_spans: prompt log-probabilities to compute.
        pool_spans: hidden states to pool.
        token_mask: allowed tokens of requests with a grammar, filled later; None if no such request samples.
        window: page table and slots of sliding-window layers; None if all layers share one memory.
        copies: page copies to and from host memory that run with this step.
        adapter_slots: int32 [B], the slot of each request's adapter, 0 without adapter; None if no request has one.
        num_drafts: int32 [B], number of drafts at the end of each request's tokens; None if no request has drafts.
        state: the segments of layers with a recurrent state, and the slots of their states; None if there are no such
            layers.
        next_ids: int64 [B], token after each request's last token in this step, for a draft head; 0 if it is sampled or
            there is none. None: all numbers are 0.
        feature_spans: tokens whose embeddings are replaced by features of pictures; their input ids are 0.
        media_work: features to compute and to delete; None without pictures.
        rope_positions: positions for the rotary embedding where they differ from `positions`: int64 [3, T], or [T] if
            the three axes are equal. None if they do not differ.
    """

    step_id: int
    rows: NDArray[np.int32]
    query_lens: NDArray[np.int32]
    seq_lens: NDArray[np.int32]
    page_table: NDArray[np.int32]
    input_ids: NDArray[np.int64]
    device_idx: NDArray[np.int64]
    positions: NDArray[np.int64]
    out_slots: NDArray[np.int64]
    num_decodes: int
    sample_idx: NDArray[np.int64]
    sample_positions: NDArray[np.int64]
    setups: tuple[RowSetup, ...] = ()
    prompt_spans: tuple[PromptLogprobSpan, ...] = ()
    pool_spans: tuple[PoolSpan, ...] = ()
    token_mask: LateMask | None = None
    window: WindowTables | None = None
    copies: StepCopies | None = None
    adapter_slots: NDArray[np.int32] | None = None
    num_drafts: NDArray[np.int32] | None = None
    state: StateSegments | None = None
    next_ids: NDArray[np.int64] | None = None
    feature_spans: tuple[FeatureSpan, ...] = ()
    media_work: MediaWork | None = None
    rope_positions: NDArray[np.int64] | None = None

    @property
    def num_tokens(self) -> int:
        """T, the number of tokens."""
        return len(self.input_ids)

    @property
    def num_prefill_tokens(self) -> int:
        """Number of tokens of prefill chunks."""
        num_tokens = len(self.input_ids) - self.num_decodes
        if self.num_drafts is None:
            return num_tokens
        return num_tokens - int(self.query_lens[self.num_drafts > 0].sum())

    @property
    def sample_token_idx(self) -> NDArray[np.int64]:
        """int64 [S], indices into T of the tokens after which a token is sampled."""
        ends = self.query_lens.cumsum(dtype=np.int64)[self.sample_idx]
        if self.num_drafts is None:
            return ends - 1
        return ends - self.seq_lens[self.sample_idx] + self.sample_positions - 1


@dataclass(frozen=True, slots=True)
class LogprobTable:
    """Log-probabilities of n tokens, from the model's unmodified logits.

    Attributes:
        token_logprobs: float32 [n].
        top_ids: int32 [n, k], most likely first.
        top_logprobs: float32 [n, k].
        requested: float32 [n, m], of the tokens that each row's request names; columns past a request's tokens are
            without meaning. None if no request names tokens.
    """

    token_logprobs: NDArray[np.float32]
    top_ids: NDArray[np.int32]
    top_logprobs: NDArray[np.float32]
    requested: NDArray[np.float32] | None = None

    def rows(self, start: int, end: int) -> "LogprobTable":
        """Return the table of the tokens start : end; its arrays are views."""
        return LogprobTable(
            self.token_logprobs[start:end],
            self.top_ids[start:end],
            self.top_logprobs[start:end],
            None if self.requested is None else self.requested[start:end],
        )


@dataclass(frozen=True, slots=True)
class MediaResult:
    """The features that a step has completed.

    Attributes:
        ready: keys of the features.
        errors: key -> error of a picture whose features could not be computed.
        tower_s: time of the tower in seconds, part of the step's `model_s`.
    """

    ready: tuple[bytes, ...]
    errors: dict[bytes, str]
    tower_s: float


class StepResult(msgspec.Struct, frozen=True, eq=False):
    """The result of a plan's execution.

    Attributes:
        token_ids: integers [S], the sampled tokens; undefined for failed samples.
        errors: index of a failed sample -> its error.
        logprobs: log-probabilities of all S samples; None if no request in the step returns log-probabilities.
        prompt_logprobs: log-probabilities of the prompt tokens, one table for each prompt span of the plan.
        model_s: device time of the step in seconds.
        pooled: float32 vectors, one per pool span of the plan.
        media: the features that were computed in the step; None without `MediaWork`.
    """

    token_ids: NDArray[np.integer]
    errors: dict[int, str]
    logprobs: LogprobTable | None
    prompt_logprobs: tuple[LogprobTable, ...]
    model_s: float
    pooled: tuple[NDArray[np.float32], ...] = ()
    media: MediaResult | None = None
