"""A scheduler on a fake device, with a clock that the test sets."""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np
import pytest

from graftlm.contracts import CacheContext, PrefixCache, SchedulingPolicy
from graftlm.memory import KVManager, PagePool, RequestTable, RowStates, StatePool, WindowPages, WindowSpan
from graftlm.observers import Observers
from graftlm.pooling.pooling import Pooling
from graftlm.scheduling import JumpForward, Request, RequestUpdate, Scheduler, SchedulerLimits
from graftlm.speculation import Speculator
from graftlm.step_loop import StepLoop
from graftlm.testing.fake_device import FakeDevice, expected_embedding, expected_output
from graftlm.types import FinishReason, SamplingParams
from graftlm_cache.chunk import ChunkCache
from graftlm_cache.radix import RadixCache
from graftlm_cache.state_radix import StateRadixCache
from graftlm_cache.swa_radix import SWARadixCache
from graftlm_eviction.lru import LRU
from graftlm_scheduling.fcfs import FirstComeFirstServed
from graftlm_scheduling.lpm import LongestPrefixMatch
from graftlm_scheduling.options import ReorderingOptions

VOCAB = 50


class LateFuture(Future):
    """The result of a step that runs only when its result is read, after the earlier steps."""

    def __init__(self, executor):
        super().__init__()
        self._executor = executor

    def result(self, timeout=None):
        self._executor.run_until(self)
        return super().result(timeout)

    def exception(self, timeout=None):
        self._executor.run_until(self)
        return super().exception(timeout)


class LateExecutor:
    """Runs steps as late as possible: no launched step runs while another one is planned."""

    failure = None

    def __init__(self, run):
        self._run = run
        self._steps = deque()

    def submit(self, plan):
        future = LateFuture(self)
        self._steps.append((plan, future))
        return future

    def when_failed(self, callback):
        pass

    def call(self, function):
        future = Future()
        while self._steps:
            self.run_until(self._steps[-1][1])
        future.set_result(function())
        return future

    def run_until(self, future):
        while not future.done():
            plan, next_future = self._steps.popleft()
            try:
                next_future.set_result(self._run(plan))
            except BaseException as error:
                next_future.set_exception(error)

    def close(self):
        pass


@dataclass
class Rig:
    """A step loop with a fake device; it collects the output of every request."""

    num_pages: int = 256
    page_size: int = 1
    num_rows: int = 8
    prefill_tokens: int = 64
    mix_chunks: bool = True
    max_queued: int = 1000
    overlap: bool = False
    reuse: bool = True
    window: WindowSpan | None = None
    num_window_pages: int = 0
    num_snapshots: int | None = None
    state_interval_tokens: int | None = None
    policy: SchedulingPolicy = field(default_factory=lambda: LongestPrefixMatch(ReorderingOptions()))
    debug: bool = True
    now: float = 0.0
    loop_class: type[StepLoop] = StepLoop
    vocab_size: int = VOCAB
    jump_forward: JumpForward | None = None
    speculator: Speculator | None = None
    cache_fails: bool = False

    def __post_init__(self):
        window_tokens = None if self.window is None else self.window.window_tokens
        num_state_slots = 0 if self.num_snapshots is None else 1 + self.num_rows + self.num_snapshots
        self.device = FakeDevice(
            self.num_pages,
            self.page_size,
            self.num_rows,
            self.vocab_size,
            window_tokens,
            self.num_window_pages,
            num_state_slots,
        )
        self.state_pool = None
        self.window_pages = (
            None if self.window is None else WindowPages(self.num_pages, self.num_window_pages, self.window)
        )
        self.plans = []
        self.use(self.speculator)
        self.tokens: dict[str, list[int]] = {}
        self.updates: dict[str, list[RequestUpdate]] = {}
        self.requests: dict[str, Request] = {}

    def use(self, speculator: Speculator | None) -> None:
        """Start anew, with a speculator."""
        self.speculator = speculator
        table = RequestTable(self.num_rows, self.num_pages)
        if self.num_snapshots is not None:
            self.state_pool = StatePool(self.num_rows, self.num_snapshots, self.num_pages)
        kv = KVManager(
            PagePool(self.num_pages),
            self.make_cache(),
            table,
            self.page_size,
            self.window_pages,
            states=None if self.state_pool is None else RowStates(self.state_pool, table, self.page_size),
        )
        limits = SchedulerLimits(self.max_queued, self.prefill_tokens, self.mix_chunks)
        self.scheduler = Scheduler(kv, self.policy, limits, self.clock, self.jump_forward, speculator)
        self.loop = self.loop_class(
            self.scheduler,
            LateExecutor(self._run),
            overlap=self.overlap,
            make_cache=self.make_cache,
            observers=Observers(),
            clock=self.clock,
            debug=self.debug,
        )

    def make_cache(self) -> PrefixCache:
        if self.cache_fails:
            raise MemoryError("no memory for a cache")
        context = CacheContext(self.page_size, LRU(), self.clock, window=self.window_pages)
        if self.window_pages is not None and self.reuse:
            return SWARadixCache(context, self.window_pages)
        if self.state_pool is not None and self.reuse:
            return StateRadixCache(context, self.state_pool, self.state_interval_tokens)
        return RadixCache(context) if self.reuse else ChunkCache(context)

    def clock(self) -> float:
        return self.now

    def _run(self, plan):
        self.plans.append(plan)
        return self.device.run(plan)

    def make_request(self, request_id, prompt, max_new_tokens=4, *, stop=(), timeout_s=None, **fields) -> Request:
        return Request(
            request_id=request_id,
            prompt_token_ids=np.array(prompt, dtype=np.int32),
            params=fields.pop("params", SamplingParams()),
            max_new_tokens=max_new_tokens,
            stop_token_ids=frozenset(stop),
            seed=0,
            arrival_s=self.now,
            deadline_s=None if timeout_s is None else self.now + timeout_s,
            **fields,
        )

    def add(self, request_id, prompt, max_new_tokens=4, **fields) -> Request:
        request = self.make_request(request_id, prompt, max_new_tokens, **fields)
        self.scheduler.add(request)
        self.requests[request_id] = request
        self.tokens[request_id], self.updates[request_id] = [], []
        return request

    def add_embedding(self, request_id, prompt, pooling, **fields) -> Request:
        return self.add(request_id, prompt, max_new_tokens=0, pooling=Pooling(pooling), **fields)

    def step(self) -> None:
        self.now += 0.001
        self.take(self.loop.step())

    def take(self, updates) -> None:
        for update in updates:
            tokens = self.tokens[update.request_id]
            del tokens[len(tokens) - update.num_dropped :]
            tokens += update.token_ids
            self.updates[update.request_id].append(update)

    def run(self, max_steps: int = 5000) -> None:
        for _ in range(max_steps):
            if not self.scheduler.has_work:
                return
            self.step()
        raise AssertionError(f"not done after {max_steps} steps")

    def finish(self, request_id):
        return self.updates[request_id][-1].finish

    def assert_right(self, request_id) -> None:
        """Assert that the request ended as expected, with the tokens of the device's arithmetic."""
        request = self.requests[request_id]
        if request.pooling is not None:
            self._assert_right_embedding(request)
            return
        expected = expected_output(request.prompt_token_ids.tolist(), request.max_new_tokens, VOCAB)
        stops = [i for i, t in enumerate(expected) if t in request.stop_token_ids]
        if stops:
            expected = expected[: stops[0] + 1]
        reason = self.finish(request_id).reason
        if reason in (FinishReason.STOP, FinishReason.LENGTH):
            assert self.tokens[request_id] == expected
            assert reason is (FinishReason.STOP if stops else FinishReason.LENGTH)
        else:
            assert self.tokens[request_id] == expected[: len(self.tokens[request_id])]

    def _assert_right_embedding(self, request) -> None:
        (update,) = self.updates[request.request_id]
        assert not update.token_ids
        if update.finish.reason is FinishReason.STOP:
            expected = expected_embedding(request.prompt_token_ids.tolist(), request.pooling)
            assert np.frombuffer(update.embedding, dtype=np.float32).tolist() == expected.tolist()
        else:
            assert update.embedding is None


@pytest.fixture
def make_rig() -> Callable[..., Rig]:
    return Rig


@pytest.fixture
def fcfs() -> SchedulingPolicy:
    return FirstComeFirstServed()
