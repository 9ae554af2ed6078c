"""One step on the device: plan in, sampled tokens out."""

import time

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from graftlm.contracts import AttentionBackend, Model
from graftlm.execution.batch import build_batch, to_device
from graftlm.execution.block_mover import BlockMover
from graftlm.execution.logprobs import token_logprobs
from graftlm.execution.sampler import NOT_FINITE, Sampled, Sampler
from graftlm.plan import LogprobTable, PoolSpan, PromptLogprobSpan, StepPlan, StepResult

__all__ = ["ModelRunner"]

_NO_TOKENS = np.empty(0, dtype=np.int32)


class ModelRunner:
    """Runs plans in the order in which they come, one at a time, always from the same thread.

    The latest token of every row stays on the device: the next step reads it there, seen by the host or not.
    """

    def __init__(
        self,
        model: Model,
        attention: AttentionBackend,
        sampler: Sampler,
        num_rows: int,
        device: torch.device,
        mover: BlockMover | None = None,
    ) -> None:
        self._model = model
        self._attention = attention
        self._sampler = sampler
        self._device = device
        self._mover = mover
        self._last_tokens = torch.zeros(num_rows, dtype=torch.int64, device=device)

    def run(self, plan: StepPlan) -> StepResult:
        """Run one step, with the copies that go with it, and wait for its tokens."""
        if self._mover is None or plan.copies is None:
            return self._run(plan)
        with self._mover.beside(plan.copies):
            return self._run(plan)

    @torch.inference_mode()
    def _run(self, plan: StepPlan) -> StepResult:
        start = time.perf_counter()
        for setup in plan.setups:
            self._sampler.set_row(setup)
        batch = build_batch(plan, self._last_tokens, self._device)
        self._attention.prepare(batch)
        hidden = self._model.forward(batch)
        sampled = self._sample(plan, hidden, batch.logits_idx) if len(plan.sample_idx) else None
        return StepResult(
            token_ids=_NO_TOKENS if sampled is None else sampled.token_ids.to("cpu", torch.int32).numpy(),
            errors={} if sampled is None else _errors(sampled),
            logprobs=None if sampled is None or sampled.logprobs is None else _to_host(*sampled.logprobs),
            prompt_logprobs=self._prompt_logprobs(plan.prompt_spans, hidden) if plan.prompt_spans else (),
            pooled=_pool(plan.pool_spans, hidden) if plan.pool_spans else (),
            model_s=time.perf_counter() - start,
        )

    def _sample(self, plan: StepPlan, hidden: Tensor, logits_idx: Tensor) -> Sampled:
        logits = self._model.logits(hidden[logits_idx])
        rows = plan.rows if len(plan.sample_idx) == len(plan.rows) else plan.rows[plan.sample_idx]
        token_mask = None if plan.token_mask is None else plan.token_mask.wait()
        sampled = self._sampler.sample(logits, rows, plan.sample_positions, token_mask)
        self._last_tokens.index_copy_(0, to_device(rows.astype(np.int64), self._device), sampled.token_ids)
        return sampled

    def _prompt_logprobs(self, spans: tuple[PromptLogprobSpan, ...], hidden: Tensor) -> tuple[LogprobTable, ...]:
        """Compute the logits of all spans' tokens together, and of no others."""
        lens = [len(span.targets) for span in spans]
        idx = np.concatenate([np.arange(s.start, s.start + n) for s, n in zip(spans, lens, strict=True)])
        targets = np.concatenate([span.targets for span in spans])
        logits = self._model.logits(hidden[to_device(idx, self._device)])
        num_top = max(span.num_top for span in spans)
        table = _to_host(*token_logprobs(logits, to_device(targets, self._device), num_top))
        return tuple([table.rows(end - n, end) for n, end in zip(lens, np.cumsum(lens).tolist(), strict=True)])


def _pool(spans: tuple[PoolSpan, ...], hidden: Tensor) -> tuple[NDArray[np.float32], ...]:
    """Add up each span's hidden states in float32; they leave the device together."""
    pieces = [hidden[span.start : span.start + span.num_tokens] for span in spans]
    return tuple(torch.stack([piece.sum(dim=0, dtype=torch.float32) for piece in pieces]).cpu().numpy())


def _errors(sampled: Sampled) -> dict[int, str]:
    (failed,) = sampled.failed.cpu().numpy().nonzero()
    return dict.fromkeys(failed.tolist(), NOT_FINITE) | sampled.processor_errors


def _to_host(token_logprob: Tensor, top_ids: Tensor, top_logprobs: Tensor) -> LogprobTable:
    return LogprobTable(token_logprob.cpu().numpy(), top_ids.to("cpu", torch.int32).numpy(), top_logprobs.cpu().numpy())
