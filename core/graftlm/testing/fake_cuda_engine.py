"""Runs requests on a fake CUDA device, with the real scheduler, runner and launches of the engine."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TypeVar

import torch
from torch import Tensor

from graftlm.assembly.draft_heads import EngineHead
from graftlm.contracts import (
    AttentionBackend,
    AttentionContext,
    DraftHead,
    ForwardBatch,
    Model,
    Outcome,
    PrefixCache,
    SchedulingPolicy,
    StepExecutor,
)
from graftlm.execution.adapter_layers import AdapterLayers
from graftlm.execution.decode_inputs import DecodeInputs, DecodeShape
from graftlm.execution.executor import Launched
from graftlm.execution.graphs import DecodeGraphs
from graftlm.execution.head_steps import HeadSteps
from graftlm.execution.hidden_capture import HiddenCapture
from graftlm.execution.kv_store import KVStore
from graftlm.execution.runner import ModelRunner
from graftlm.execution.sampler import Sampler
from graftlm.execution.split_attention import SplitAttention
from graftlm.execution.state_store import StateStore
from graftlm.memory import KVManager, PagePool, RequestTable, RowStates, StatePool, WindowPages
from graftlm.observers import Observers
from graftlm.plan import StepPlan, StepResult
from graftlm.scheduling import Request, RequestUpdate, Scheduler, SchedulerLimits
from graftlm.speculation import Speculator
from graftlm.step_loop import StepLoop
from graftlm.testing.fake_cuda import FakeCuda
from graftlm.testing.fake_cuda_region import FakeCapture
from graftlm.testing.recording import TickingClock

__all__ = ["FakeCudaEngine"]

T = TypeVar("T")

_MAX_STEPS = 200


class FakeCudaEngine:
    """An engine that runs requests to their end on a fake device, in the thread that entered the device's context.

    Args:
        cuda: fake device, whose context must be entered.
        model: model on the device, without loaded weights.
        make_attention: function that creates the attention backend.
        make_cache: function that creates the prefix cache.
        policy: policy that orders waiting requests.
        sampler: sampler for 8 rows, on the device.
        dtype: dtype of the model.
        kv_dtype: dtype of the KV cache; None: `dtype`.
        page_size: number of tokens in a page.
        graph_sizes: numbers of requests for which decode steps are captured; empty: no graphs.
        window: pages of the sliding-window layers; None: all layers share one memory.
        states: slots of recurrent states; None: the model has no such states.
        adapters: the model's layers with adapters; None: no adapters.
        head: the draft head, and the handle that its drafter uses; None: no head.
        overlap: whether a step is launched before the previous step's result is read.
        make_runner: function that creates the runner.

    Attributes:
        kv: the KV cache.
        runner: the runner.
        graphs: the captured decode steps; None without `graph_sizes`.
        plans: the plans of all steps so far.
    """

    num_rows = 8
    num_pages = 64
    max_pages = 16
    prefill_tokens = 24

    def __init__(
        self,
        cuda: FakeCuda,
        model: Model,
        make_attention: Callable[[AttentionContext], AttentionBackend],
        make_cache: Callable[[], PrefixCache],
        policy: SchedulingPolicy,
        sampler: Sampler,
        *,
        dtype: torch.dtype,
        kv_dtype: torch.dtype | None = None,
        page_size: int = 16,
        graph_sizes: Sequence[int] = (),
        window: WindowPages | None = None,
        states: StatePool | None = None,
        adapters: AdapterLayers | None = None,
        overlap: bool = False,
        speculator: Speculator | None = None,
        head: tuple[DraftHead, EngineHead] | None = None,
        make_runner: Callable[..., ModelRunner] = ModelRunner,
    ) -> None:
        self._cuda = cuda
        self.plans: list[StepPlan] = []
        num_window_pages = None if window is None else window.num_window_pages
        layers, num_spare = list(model.attention_layers), int(bool(graph_sizes))
        if head is not None:
            layers.append(head[0].attention_layer)
        kv = KVStore(
            layers, self.num_pages, page_size, kv_dtype or dtype, cuda.device, num_window_pages, spare_pages=num_spare
        )
        context = AttentionContext(
            layers, kv, page_size, cuda.device, dtype, self.num_rows, max_context_len=self.max_pages * page_size
        )
        attention = make_attention(context)
        if window is not None:
            attention = SplitAttention(attention, make_attention(context))
        model.bind_attention(attention)
        if states is not None:
            model.bind_states(StateStore(model.state_layers, states.num_slots, cuda.device).tensors)
        steps = None
        if head is not None:
            own = attention.full if isinstance(attention, SplitAttention) else attention
            assert own is not None
            capture = HiddenCapture(model, head[0].hidden_layers)
            steps = HeadSteps(head[0], own, kv, self.num_rows, dtype), capture
        forward = model.forward if steps is None else steps[1].forward
        self.graphs = self._capture(forward, attention, kv, graph_sizes) if graph_sizes else None
        self.kv = kv
        self.runner = make_runner(
            model, attention, sampler, self.num_rows, cuda.device, None, self.graphs, adapters, cuda.streams, steps
        )
        clock = TickingClock()
        table = RequestTable(self.num_rows, self.max_pages)
        row_states = None if states is None else RowStates(states, table, page_size)
        memory = KVManager(PagePool(self.num_pages), make_cache(), table, page_size, window, states=row_states)
        limits = SchedulerLimits(100, self.prefill_tokens, True)
        self._scheduler = Scheduler(memory, policy, limits, clock, speculator=speculator)
        self._executor = _Executor(self)
        if head is not None:
            head[1].bind(self.runner, self._executor, table, page_size)
        self._loop = StepLoop(
            self._scheduler,
            self._executor,
            overlap=overlap,
            make_cache=make_cache,
            observers=Observers(),
            clock=clock,
            debug=True,
        )

    def run(self, *requests: Request) -> dict[str, list[RequestUpdate]]:
        """Run requests; one request arrives per step. Return request id -> updates.

        Raises:
            FakeCudaError: a step does something that is not allowed on a GPU.
            Exception: a step failed for another reason.
        """
        updates: dict[str, list[RequestUpdate]] = {request.request_id: [] for request in requests}
        waiting = list(requests)
        for _ in range(_MAX_STEPS):
            if waiting:
                self._scheduler.add(waiting.pop(0))
            elif not self._scheduler.has_work:
                return updates
            for update in self._loop.step():
                updates[update.request_id].append(update)
            self._executor.check()
        raise AssertionError(f"requests did not end in {_MAX_STEPS} steps")

    def launching(self, function: Callable[[], T]) -> T:
        """Call a function that launches work; check that the host does not wait for the device."""
        with self._cuda.launching():
            return function()

    def launch(self, plan: StepPlan) -> Launched:
        """Launch a step; check that the host does not wait for the device."""
        self.plans.append(plan)
        with self._cuda.launching():
            return self.runner.launch(plan)

    def _capture(
        self,
        forward: Callable[[ForwardBatch], Tensor],
        attention: AttentionBackend,
        kv: KVStore,
        graph_sizes: Sequence[int],
    ) -> DecodeGraphs:
        spare_pages = (kv.num_pages, kv.num_window_pages) if kv.has_window_memory else (kv.num_pages,)
        shape = DecodeShape(self.num_rows, max(graph_sizes), self.max_pages, kv.page_size, spare_pages)
        inputs = DecodeInputs(shape, kv.device)
        return DecodeGraphs(inputs, graph_sizes, attention, forward, FakeCapture(self._cuda.region))


class _Executor(StepExecutor):
    """An executor that launches a step in `submit` and reads its result in `result`. It stores the first error."""

    def __init__(self, engine: FakeCudaEngine) -> None:
        self._engine = engine
        self._error: BaseException | None = None

    def check(self) -> None:
        """Raise the first error of a step again. The step loop handled it like a failure of the device."""
        if self._error is not None:
            raise self._error

    def submit(self, plan: StepPlan) -> Outcome[StepResult]:
        outcome: _Outcome = _Outcome(self)
        try:
            outcome.launched = self._engine.launch(plan)
        except BaseException as error:
            self.keep(error)
            outcome.error = error
        return outcome

    def call(self, function: Callable[[], T]) -> Outcome[T]:
        future: Future[T] = Future()
        try:
            future.set_result(self._engine.launching(function))
        except BaseException as error:
            self.keep(error)
            future.set_exception(error)
        return future

    def close(self) -> None:
        """Do nothing."""

    def keep(self, error: BaseException) -> None:
        """Store an error if it is the first one."""
        self._error = self._error or error


class _Outcome:
    """A launched step, or the error that its launch raised."""

    def __init__(self, executor: _Executor) -> None:
        self.launched: Launched | None = None
        self.error: BaseException | None = None
        self._executor = executor
        self._result: StepResult | None = None

    def result(self, timeout: float | None = None) -> StepResult:
        self._read()
        if self._result is None:
            raise self.error or AssertionError("a step was not launched")
        return self._result

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self._read()
        return self.error

    def _read(self) -> None:
        if self.launched is None or self._result is not None or self.error is not None:
            return
        try:
            self._result = self.launched.result()
        except BaseException as error:
            self._executor.keep(error)
            self.error = error
