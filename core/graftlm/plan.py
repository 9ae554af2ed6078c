"""What passes between the scheduler and the runner: plain data, built once by its sender.

Both ends name a running request by its row, an index into the request table that is its own from admission until it
finishes or is retracted.
"""

from concurrent.futures import Future
from dataclasses import dataclass, field

import msgspec
import numpy as np
from numpy.typing import NDArray

from graftlm.contracts import StepCopies
from graftlm.pooling.pooling import Pooling
from graftlm.types import SamplingParams, TokenIds

__all__ = [
    "LateMask",
    "LogprobTable",
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
    """A request that takes a row with this step: what the sampler must know of it.

    Attributes:
        seed: with a position, the key of the request's noise.
        prompt_token_ids: int32 [n], for the repetition penalty.
        output_token_ids: int32 [m], generated before a retraction; else empty.
        stop_token_ids: tokens that may not be sampled before `min_tokens`.
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
    """Prompt positions of one request whose logits are wanted.

    Attributes:
        start: index among the step's T tokens of the first token that predicts.
        targets: int64 [n], the tokens they should have predicted.
        num_top: how many rivals to report.
    """

    row: int
    start: int
    targets: NDArray[np.int64]
    num_top: int


@dataclass(frozen=True, slots=True)
class PoolSpan:
    """Prompt positions of one request whose final hidden states are wanted.

    Attributes:
        pooling: what is wanted of them; the last one's is wanted, or their sum.
        start: index among the step's T tokens of the first of them.
        is_last: they reach to the end of the prompt, and with it of the request.
    """

    row: int
    pooling: Pooling
    start: int
    num_tokens: int
    is_last: bool


@dataclass(frozen=True, slots=True)
class TokenMask:
    """The tokens that M of a step's S sampling requests may sample; the others may sample any.

    Attributes:
        idx: int64 [M], indices into S, ascending.
        bits: int32 [M, ceil(V / 32)], bit i of word w is token 32 w + i; at least one is set in each row.
    """

    idx: NDArray[np.int64]
    bits: NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class LateMask:
    """A token mask that is told when the step before has been committed, while this step's forward pass runs.

    Attributes:
        idx: as in `TokenMask`.
        bits: of what `TokenMask` holds under that name. Cancelled when the step is given up.
    """

    idx: NDArray[np.int64]
    bits: "Future[NDArray[np.int32]]" = field(default_factory=Future)

    def wait(self) -> TokenMask:
        """Return the mask as soon as it is known.

        Raises:
            CancelledError: the step has been given up.
        """
        return TokenMask(self.idx, self.bits.result())


@dataclass(frozen=True, slots=True)
class WindowTables:
    """A step's page table and slots in the memory of the layers with a sliding window.

    Attributes:
        page_table: int32 [B, P]; entries that no window reaches are in range and mean nothing.
        out_slots: int64 [T].
    """

    page_table: NDArray[np.int32]
    out_slots: NDArray[np.int64]


# Each step makes one, and a frozen dataclass of as many fields would take ten times as long to make.
class StepPlan(msgspec.Struct, frozen=True, eq=False):
    """One forward pass: T tokens of B requests, of which S sample. One-token requests come first.

    Attributes:
        rows: int32 [B]; the very same array as in the plan before where the same rows decode again.
        query_lens: int32 [B], tokens each request brings.
        seq_lens: int32 [B], its context with them.
        page_table: int32 [B, P]; entries past a request's pages are in range and mean nothing.
        input_ids: int64 [T]; where `device_idx` points, the runner puts the row's latest sampled token.
        device_idx: int64 [N], indices into T.
        positions: int64 [T].
        out_slots: int64 [T].
        num_decodes: requests at the front that bring one token.
        sample_idx: int64 [S], indices into B of the requests that sample from their last token.
        sample_positions: int64 [S], the position that the sampled token will take.
        setups: rows taken with this step; the runner installs them first.
        prompt_spans: prompt log-probabilities to compute.
        pool_spans: hidden states to read.
        token_mask: what requests under a grammar may sample, told later; None when no such request samples.
        window: where layers with a sliding window find and write theirs; None where all layers share one memory.
        copies: pages to copy to or from host memory with this step.
        adapter_slots: int32 [B], the slot of each request's adapter, 0 for those without; None when none has one.
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

    @property
    def num_tokens(self) -> int:
        """T."""
        return len(self.input_ids)

    @property
    def num_prefill_tokens(self) -> int:
        """Tokens of requests past the one-token ones."""
        return len(self.input_ids) - self.num_decodes


@dataclass(frozen=True, slots=True)
class LogprobTable:
    """Log-probabilities of n tokens, of the model's unmodified logits.

    Attributes:
        token_logprobs: float32 [n].
        top_ids: int32 [n, k], most likely first.
        top_logprobs: float32 [n, k].
    """

    token_logprobs: NDArray[np.float32]
    top_ids: NDArray[np.int32]
    top_logprobs: NDArray[np.float32]

    def rows(self, start: int, end: int) -> "LogprobTable":
        """Return the table of the tokens start : end, as views."""
        return LogprobTable(self.token_logprobs[start:end], self.top_ids[start:end], self.top_logprobs[start:end])


class StepResult(msgspec.Struct, frozen=True, eq=False):
    """What the device made of a plan.

    Attributes:
        token_ids: integers [S]; meaningless where a request failed.
        errors: index into S -> why that request failed.
        logprobs: for all S when any of them asked, else None.
        prompt_logprobs: one per prompt span of the plan.
        model_s: seconds from launch to the last token.
        pooled: float32 vectors, one per pool span of the plan.
    """

    token_ids: NDArray[np.integer]
    errors: dict[int, str]
    logprobs: LogprobTable | None
    prompt_logprobs: tuple[LogprobTable, ...]
    model_s: float
    pooled: tuple[NDArray[np.float32], ...] = ()
