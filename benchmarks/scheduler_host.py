"""Times the scheduler's thread without a model: planning, committing, admission, and ordering of the queue.

    python benchmarks/scheduler_host.py [--json FILE] [--steps N] [--repeats N]

"Decode" is a step of 64 running requests with one token each, with the radix cache. "Admit" is the step that admits 64
requests; all tokens of their prompts except 64 are cached. "Order" sorts a queue of 1,000 requests with the policy
`lpm`: for the first time, again after other prompts have changed the cache, and again without a change. "Queue" is a
step of 64 running requests while 1,000 requests wait. Times are the thread's CPU time, because other processes affect
it less than wall time.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
from rich.console import Console
from rich.table import Table

from graftlm.contracts import CacheContext
from graftlm.memory import KVManager, PagePool, RequestTable
from graftlm.plan import StepPlan, StepResult
from graftlm.scheduling import Request, Scheduler, SchedulerLimits
from graftlm.scheduling.queue import WaitingQueue
from graftlm.types import SamplingParams, TokenIds
from graftlm_cache.radix import RadixCache
from graftlm_eviction.lru import LRU
from graftlm_scheduling.lpm import LongestPrefixMatch
from graftlm_scheduling.options import ReorderingOptions

T = TypeVar("T")

NUM_ROWS = 64
QUEUE_LEN = 1000
OWN_TOKENS = 64
VOCAB_SIZE = 128_000
PARAMS = SamplingParams(temperature=0, ignore_eos=True)


@dataclass(frozen=True, slots=True)
class Cell:
    """The time of one operation, in microseconds."""

    operation: str
    context: int
    page_size: int
    median_us: float
    p99_us: float


class Rig:
    """A scheduler with memory for its running requests, and a simulated device that returns results immediately."""

    def __init__(self, context: int, page_size: int) -> None:
        self.context = context
        self.page_size = page_size
        self.tokens = np.random.default_rng(0)
        self.num_requests = 0
        pages_per_row = -(-2 * context // page_size)
        pool = PagePool((NUM_ROWS + 1) * pages_per_row)
        self.cache = RadixCache(CacheContext(page_size, LRU(), time.monotonic))
        self.kv = KVManager(pool, self.cache, RequestTable(NUM_ROWS, pages_per_row), page_size)
        self.policy = LongestPrefixMatch(ReorderingOptions())
        limits = SchedulerLimits(max_queued_requests=QUEUE_LEN, prefill_tokens_per_step=2 * NUM_ROWS * context)
        self.scheduler = Scheduler(self.kv, self.policy, limits, time.monotonic)

    def draw(self, num_tokens: int) -> TokenIds:
        """Return random tokens."""
        return self.tokens.integers(0, VOCAB_SIZE, num_tokens, dtype=np.int32)

    def request(self, prompt: TokenIds, max_new_tokens: int) -> Request:
        """Return a greedy request without stop tokens: it ends at `max_new_tokens`."""
        self.num_requests += 1
        name, now = f"r{self.num_requests}", time.monotonic()
        return Request(name, prompt, PARAMS, max_new_tokens, frozenset(), seed=0, arrival_s=now)

    def prompts(self, count: int) -> list[TokenIds]:
        """Return prompts of `context` tokens that differ only in their last tokens."""
        shared = self.draw(self.context - OWN_TOKENS)
        return [np.concatenate([shared, self.draw(OWN_TOKENS)]) for _ in range(count)]

    def finish_all(self) -> None:
        """Run until all requests have finished."""
        while (plan := self.scheduler.plan()) is not None:
            self.scheduler.commit(plan, answer(plan))


def answer(plan: StepPlan) -> StepResult:
    """Return the same token for every request that samples."""
    return StepResult(np.full(len(plan.sample_idx), 7, dtype=np.int32), {}, None, (), model_s=0.0)


def decode(rig: Rig, num_steps: int) -> Iterator[Cell]:
    """Time planning and committing of steps that only decode, with the engine's overlap."""
    for prompt in rig.prompts(NUM_ROWS):
        rig.scheduler.add(rig.request(prompt, num_steps + 4))
    pending = rig.scheduler.plan()
    plan_s: list[float] = []
    commit_s: list[float] = []
    for _ in range(num_steps):
        start = time.thread_time()
        plan = rig.scheduler.plan()
        planned = time.thread_time()
        if plan is None or pending is None:
            raise RuntimeError("the requests ended before the measurement did")
        result = answer(pending)
        answered = time.thread_time()
        rig.scheduler.commit(pending, result)
        plan_s.append(planned - start)
        commit_s.append(time.thread_time() - answered)
        pending = plan
    yield cell(rig, f"decode: plan {NUM_ROWS} requests", plan_s[2:])
    yield cell(rig, f"decode: commit {NUM_ROWS} requests", commit_s[2:])


def admit(rig: Rig, repeats: int) -> Iterator[Cell]:
    """Time the step that admits requests with a cached prefix, and the step in which they end."""
    admit_s: list[float] = []
    finish_s: list[float] = []
    for _ in range(repeats):
        first, *others = rig.prompts(NUM_ROWS + 1)
        rig.scheduler.add(rig.request(first, 1))
        rig.finish_all()
        for prompt in others:
            rig.scheduler.add(rig.request(prompt, 1))
        plan = timed(rig.scheduler.plan, admit_s)
        if plan is None or len(plan.rows) != NUM_ROWS:
            raise RuntimeError(f"expected {NUM_ROWS} requests in one step")
        timed(partial(rig.scheduler.commit, plan, answer(plan)), finish_s)
    yield cell(rig, f"admit: plan {NUM_ROWS} requests, prefix cached", admit_s)
    yield cell(rig, f"admit: commit {NUM_ROWS} requests, all finish", finish_s)


def order(rig: Rig, repeats: int) -> Iterator[Cell]:
    """Time the policy on a long queue; half of the requests have a cached prefix."""
    first, *cached = rig.prompts(QUEUE_LEN // 2 + 1)
    rig.scheduler.add(rig.request(first, 1))
    rig.finish_all()
    prompts = [prompt for pair in zip(cached, rig.prompts(len(cached)), strict=True) for prompt in pair]
    first_s: list[float] = []
    again_s: list[float] = []
    changed_s: list[float] = []
    for _ in range(repeats):
        queue = WaitingQueue(rig.policy, lambda: rig.cache, rig.page_size)
        for prompt in prompts:
            queue.add(rig.request(prompt, 1))
        timed(partial(queue.ordered, time.monotonic()), first_s)
        timed(partial(queue.ordered, time.monotonic()), again_s)
        rig.scheduler.add(rig.request(rig.draw(rig.context), 1))
        rig.finish_all()
        timed(partial(queue.ordered, time.monotonic()), changed_s)
    yield cell(rig, f"order: lpm, {QUEUE_LEN} new requests", first_s)
    yield cell(rig, f"order: lpm, {QUEUE_LEN} requests, cache changed", changed_s)
    yield cell(rig, f"order: lpm, {QUEUE_LEN} requests, cache unchanged", again_s)


def queued(rig: Rig, num_steps: int) -> Iterator[Cell]:
    """Time planning with a long queue, separately for steps in which a queued request replaces a finished one.

    Prompts are in groups of 20 that share half of their tokens. A new request joins the queue for each finished one.
    """
    prompts = grouped_prompts(rig)
    for num_new_tokens in range(NUM_ROWS):
        rig.scheduler.add(rig.request(next(prompts), 2 * num_new_tokens + 2))
    step(rig, [])
    while rig.scheduler.num_waiting < QUEUE_LEN:
        rig.scheduler.add(rig.request(next(prompts), 2 * NUM_ROWS))
    enter_s: list[float] = []
    decode_s: list[float] = []
    for _ in range(num_steps):
        has_room = rig.scheduler.num_running < NUM_ROWS
        step(rig, enter_s if has_room else decode_s)
        while rig.scheduler.num_waiting < QUEUE_LEN:
            rig.scheduler.add(rig.request(next(prompts), 2 * NUM_ROWS))
    yield cell(rig, f"queue of {QUEUE_LEN}: plan a step in which one enters", enter_s[2:])
    yield cell(rig, f"queue of {QUEUE_LEN}: plan a step in which none does", decode_s[2:])


def step(rig: Rig, durations_s: list[float]) -> None:
    """Plan and commit one step; record the time for planning."""
    plan = timed(rig.scheduler.plan, durations_s)
    if plan is None:
        raise RuntimeError("the requests ended before the measurement did")
    rig.scheduler.commit(plan, answer(plan))


def grouped_prompts(rig: Rig) -> Iterator[TokenIds]:
    """Yield an infinite sequence of prompts, in groups of 20 that share half of their tokens."""
    while True:
        shared = rig.draw(rig.context // 2)
        for _ in range(20):
            yield np.concatenate([shared, rig.draw(rig.context - len(shared))])


def timed(call: Callable[[], T], durations_s: list[float]) -> T:
    start = time.thread_time()
    result = call()
    durations_s.append(time.thread_time() - start)
    return result


def cell(rig: Rig, operation: str, durations_s: list[float]) -> Cell:
    median, p99 = np.percentile(durations_s, [50, 99]) * 1e6
    return Cell(operation, rig.context, rig.page_size, float(median), float(p99))


def cells(num_steps: int, repeats: int) -> Iterator[Cell]:
    for context in (1024, 4096):
        for page_size in (1, 16):
            yield from decode(Rig(context, page_size), num_steps)
            yield from admit(Rig(context, page_size), repeats)
            yield from order(Rig(context, page_size), repeats)
            yield from queued(Rig(context, page_size), num_steps)


def show(rows: list[Cell]) -> None:
    """Print a table with one row per operation, and one column per context and page size."""
    setups = list(dict.fromkeys((row.context, row.page_size) for row in rows))
    table = Table(title="CPU time of the scheduling thread: median (99th percentile) in µs")
    table.add_column("operation")
    for context, page_size in setups:
        table.add_column(f"context {context}, page {page_size}", justify="right")
    for operation in dict.fromkeys(row.operation for row in rows):
        line = [row for row in rows if row.operation == operation]
        table.add_row(operation, *(f"{row.median_us:,.0f} ({row.p99_us:,.0f})" for row in line))
    Console(width=140).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="save the figures here")
    parser.add_argument("--steps", type=int, default=300, help="decoding steps timed")
    parser.add_argument("--repeats", type=int, default=20, help="admissions and orderings timed")
    arguments = parser.parse_args()
    rows = list(cells(arguments.steps, arguments.repeats))
    show(rows)
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")


if __name__ == "__main__":
    main()
