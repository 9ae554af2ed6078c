"""A rig that runs single steps of given shapes on an engine's device parts."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from msgspec.structs import replace
from torch import Tensor

from graftlm.assembly.assemble import assemble
from graftlm.assembly.device_parts import DeviceParts
from graftlm.assembly.target import detect_platform
from graftlm.bench.roofline.cases import Case
from graftlm.bench.roofline.clock import Clock, clock_for
from graftlm.bench.roofline.cost import Cost, lm_head_cost, sampler_cost
from graftlm.bench.roofline.counter import OperatorCounter
from graftlm.bench.roofline.operators import ATTENTION_PLAN, LM_HEAD, REST, SAMPLER, operators
from graftlm.bench.roofline.timer import OperatorTimer
from graftlm.checkpoint import load_model_config, resolve_checkpoint
from graftlm.config import EngineConfig
from graftlm.execution.batch import BatchBuilder
from graftlm.execution.kv_store import KVStore
from graftlm.plan import StepPlan
from graftlm.registry import Registry

__all__ = ["Rig", "longest_context", "open_rig"]


class Rig:
    """A runner of single steps: without hooks, as the engine runs them, or with a timer on each operator.

    Args:
        parts: the device parts of an engine; the engine's loop must not run.
        page_size: number of tokens in a page.
        vocab_size: size of the vocabulary, V.
    """

    def __init__(self, parts: DeviceParts, page_size: int, vocab_size: int) -> None:
        self.device, self.dtype = parts.kv.device, parts.dtype
        self.attention_name = parts.attention_name
        self.clock: Clock = clock_for(self.device)
        self._parts = parts
        self._page_size = page_size
        self._vocab_size = vocab_size
        self._operators = operators(parts.model)
        self._batches = BatchBuilder(torch.zeros(1, dtype=torch.int64, device=self.device))  # no step reads it
        _fill(parts)

    @property
    def kv_bytes_per_token(self) -> int:
        """Size of the keys and values of one token in bytes, in the model's dtype."""
        return KVStore.bytes_per_token(self._parts.model.attention_layers, self.dtype)

    def plan(self, case: Case) -> StepPlan:
        """Return a case's plan. Runs the step once, which sets up the sampler's rows and loads kernels."""
        plan = case.plan(self._page_size, self._vocab_size)
        self._parts.runner.run(replace(plan, setups=case.setups()))
        return plan

    def step_s(self, plan: StepPlan) -> float:
        """Run a step as the engine does. Return the time in seconds until its tokens are on the host."""
        start = time.perf_counter()
        self._parts.runner.run(plan)
        return time.perf_counter() - start

    @torch.inference_mode()
    def operators_s(self, plan: StepPlan) -> dict[str, float]:
        """Run a step with a timer on every operator.

        Returns: operator name -> time in seconds; `REST` is the rest of the step.
        """
        timer = OperatorTimer(self.clock)
        parts = self._parts
        with timer.attached(self._operators), timer.span(REST):
            batch = self._batches.build(plan)
            with timer.span(ATTENTION_PLAN):
                parts.attention.prepare(batch)
            hidden = parts.model.forward(batch)[batch.logits_idx]
            with timer.span(LM_HEAD):
                logits = parts.model.logits(hidden)
            with timer.span(SAMPLER):
                self._sample(plan, logits)
        return timer.take()

    @torch.inference_mode()
    def costs(self, plan: StepPlan) -> dict[str, Cost]:
        """Run a step; return operator name -> cost."""
        counter = OperatorCounter(plan, self._parts.kv.dtype)
        batch = self._batches.build(plan)
        self._parts.attention.prepare(batch)
        with counter.attached(self._operators):
            hidden = self._parts.model.forward(batch)[batch.logits_idx]
        logits = self._parts.model.logits(hidden)
        return {**counter.costs, LM_HEAD: lm_head_cost(hidden, logits), SAMPLER: sampler_cost(logits)}

    def _sample(self, plan: StepPlan, logits: Tensor) -> None:
        self._parts.sampler.sample(logits, plan.rows[plan.sample_idx], plan.sample_positions)


@contextmanager
def open_rig(config: EngineConfig, cases: Sequence[Case]) -> Iterator[Rig]:
    """Assemble a configuration's engine without a prefix cache, with enough rows and KV memory for the cases.

    Args:
        cases: the cases, at least one.

    Raises:
        GraftlmError: the configuration, a plugin or the checkpoint is wrong; the subclass depends on the cause.
    """
    page_size = config.cache.page_size
    num_tokens = max(case.num_pages(page_size) for case in cases) * page_size
    num_rows = max(case.num_requests for case in cases)
    overrides = [
        "scheduling.overlap=false",
        f"scheduling.max_running_requests={max(num_rows, config.scheduling.max_running_requests)}",
        f"memory.kv_tokens={num_tokens}",
    ]
    cache = {"name": "chunk", "page_size": page_size}
    config = EngineConfig.load({**config.model_dump(exclude={"cache"}), "cache": cache}, overrides)
    platform = detect_platform(config)
    parts = assemble(config, Registry.load(config.plugins, (), platform), platform)
    try:
        yield Rig(parts.device_parts, page_size, parts.model_config.vocab_size)
    finally:
        parts.loop.close()


def longest_context(config: EngineConfig) -> int:
    """Return the context length of a configuration's model, in tokens.

    Raises:
        ModelError: the checkpoint does not exist.
    """
    longest = load_model_config(resolve_checkpoint(config.model.path)).max_position_embeddings
    return min(longest, config.model.context_len or longest)


def _fill(parts: DeviceParts) -> None:
    """Write to the whole KV memory.

    The operating system maps all unwritten memory to the same page of zeros, which stays in the CPU caches. Reads would
    then be faster than in a real step.
    """
    for layer in parts.model.attention_layers:
        for tensor in parts.kv.stored(layer.layer_id):
            tensor.copy_(torch.randn(tensor.shape, device=tensor.device))
