"""The steps that a roofline run measures: decode steps of some batch sizes, and prefill chunks of some lengths."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from graftlm.plan import RowSetup, StepPlan
from graftlm.types import SamplingParams

__all__ = ["Case", "fitting_cases"]


@dataclass(frozen=True, slots=True)
class Case:
    """One kind of step: a decode step of requests with equal contexts, or the prefill of one whole prompt.

    Attributes:
        kind: "decode" or "prefill".
        num_requests: number of requests, B.
        seq_len: number of tokens in each request's context, including those of the step.
    """

    kind: Literal["decode", "prefill"]
    num_requests: int
    seq_len: int

    def __str__(self) -> str:
        if self.kind == "prefill":
            return f"prefill of {self.seq_len:,} tokens"
        return f"decode, batch {self.num_requests}, context {self.seq_len:,}"

    def num_pages(self, page_size: int) -> int:
        """Return the number of pages of all requests, which do not share pages."""
        return self.num_requests * -(-self.seq_len // page_size)

    def plan(self, page_size: int, vocab_size: int) -> StepPlan:
        """Return the step's plan, with random tokens and greedy sampling; request b has row b and its own pages."""
        count, end = self.num_requests, self.seq_len
        query_len = 1 if self.kind == "decode" else end
        num_tokens = count * query_len
        pages = np.arange(self.num_pages(page_size), dtype=np.int32).reshape(count, -1)
        positions = np.tile(np.arange(end - query_len, end, dtype=np.int64), count)
        at = np.repeat(np.arange(count), query_len)
        return StepPlan(
            step_id=0,
            rows=np.arange(count, dtype=np.int32),
            query_lens=np.full(count, query_len, dtype=np.int32),
            seq_lens=np.full(count, end, dtype=np.int32),
            page_table=pages,
            input_ids=np.random.default_rng(0).integers(0, vocab_size, num_tokens),
            device_idx=np.empty(0, dtype=np.int64),
            positions=positions,
            out_slots=pages[at, positions // page_size].astype(np.int64) * page_size + positions % page_size,
            num_decodes=count if query_len == 1 else 0,
            sample_idx=np.arange(count, dtype=np.int64),
            sample_positions=np.full(count, end, dtype=np.int64),
        )

    def setups(self) -> tuple[RowSetup, ...]:
        """Return the setups of the rows, which the sampler needs before the step runs."""
        none = np.empty(0, dtype=np.int32)
        greedy = SamplingParams(temperature=0.0)
        return tuple(RowSetup(row, f"r{row}", greedy, 0, none, none, ()) for row in range(self.num_requests))


def fitting_cases(
    batches: Sequence[int], context_len: int, prefill_lens: Sequence[int], longest: int
) -> tuple[list[Case], list[str]]:
    """Return the cases that a model can run, and a line of text about each case that it cannot run.

    Args:
        batches: numbers of requests of the decode steps.
        context_len: number of tokens in the context of each request.
        prefill_lens: numbers of tokens of the prefill chunks.
        longest: context length of the model, in tokens.
    """
    cases = [Case("decode", batch, context_len) for batch in batches]
    cases += [Case("prefill", 1, length) for length in prefill_lens]
    # A full context would have no room for the token that the step samples.
    fitting = [case for case in cases if case.seq_len < longest]
    left_out = [
        f"{case}: left out, because the model's context has only {longest:,} tokens"
        for case in cases
        if case not in fitting
    ]
    return fitting, left_out
