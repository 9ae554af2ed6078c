"""Measures the cache hit rate of each scheduling policy, compared with the highest rate of any request order.

    python benchmarks/cache_aware.py [--json FILE] [--seeds N] [--policies NAME ...]

The real scheduler, memory manager and radix cache run on a simulated device without a model. The clock is simulated
too: a step takes `STEP_S`, plus `TOKEN_S` for each prompt token. The workloads are drawn from seeds:

- few-shot: 48 tasks with 900 to 1,100 tokens of examples each. Each task has 24 short questions. All requests arrive
  together, in random order;
- tree-of-thought: 24 problems after one instruction. Each thought has three successors, which are sent when the thought
  is complete; the depth of the tree is four;
- multi-turn: 160 conversations of six turns with one of four system prompts. A turn is sent when the previous turn is
  answered.

The optimum is the hit rate if every distinct prefix is computed only once, as with unlimited memory. If the requests
run one at a time, in depth-first order of their radix tree, memory for the longest request is enough to reach the
optimum (Zheng et al., arXiv:2312.07104, theorem 3.1). A token is a hit if it is not computed; a token that is computed
again after a retraction is a miss.

The memory's size is printed in tokens, and as a share of all distinct tokens. The running requests need a part of the
memory; a smaller batch would have a higher hit rate, but take longer. For "late", the time from a request's first
pass-over to its admission is compared with `max_wait_s`; "late" is the largest excess. "out of turn" is the number of
admissions before an aged request that arrived earlier; it must be 0.
"""

import argparse
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

import graftlm_scheduling
from graftlm.contracts import CacheContext, PrefixKey, SchedulingContext, SchedulingPolicy
from graftlm.memory import KVManager, PagePool, RequestTable
from graftlm.scheduling import Request, RequestUpdate, Scheduler, SchedulerLimits
from graftlm.testing.fake_device import FakeDevice
from graftlm.types import SamplingParams, TokenIds
from graftlm_cache.radix import RadixCache
from graftlm_eviction.lru import LRU

VOCAB_SIZE = 32_000
NUM_ROWS = 16
PREFILL_TOKENS = 2048
STEP_S = 0.010
TOKEN_S = 0.000_025
MAX_WAIT_S = 60.0
MEMORY_SHARES = (0.05, 0.1, 0.2)
PARAMS = SamplingParams(temperature=0, ignore_eos=True)
PROVIDERS = {provider.name: provider for provider in graftlm_scheduling.provide_scheduling_policies()}


@dataclass(frozen=True, slots=True)
class Call:
    """One request of a program, and the requests that are sent after it.

    Attributes:
        tokens: prompt tokens that are appended to the previous call's prompt and output.
        followers: calls that are sent when this one is complete.
    """

    tokens: TokenIds
    num_output_tokens: int
    followers: tuple["Call", ...] = ()

    def count(self) -> int:
        """Return the number of calls in this subtree."""
        return 1 + sum(call.count() for call in self.followers)


class Draw:
    """A generator of random tokens and lengths, with a seed."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)

    def tokens(self, least: int, most: int) -> TokenIds:
        """Return `least` to `most` random tokens, int32."""
        return self.random.integers(0, VOCAB_SIZE, self.number(least, most), dtype=np.int32)

    def number(self, least: int, most: int) -> int:
        """Return a number from `least` to `most`."""
        return int(self.random.integers(least, most + 1))


def few_shot(draw: Draw, scale: float) -> list[Call]:
    """Return the calls of few-shot: each prompt has the examples of a task, then a question."""
    calls = []
    for _ in range(round(48 * scale)):
        examples = draw.tokens(900, 1100)
        for _ in range(24):
            calls.append(Call(np.concatenate([examples, draw.tokens(20, 80)]), draw.number(4, 16)))
    return [calls[i] for i in draw.random.permutation(len(calls))]


def tree_of_thought(draw: Draw, scale: float) -> list[Call]:
    """Return the calls of tree-of-thought: one tree of calls for each problem."""

    def think(tokens: TokenIds, depth: int) -> Call:
        followers = () if depth == 0 else tuple([think(draw.tokens(8, 24), depth - 1) for _ in range(3)])
        return Call(tokens, draw.number(24, 64), followers)

    instruction = draw.tokens(300, 300)
    return [think(np.concatenate([instruction, draw.tokens(100, 400)]), depth=4) for _ in range(round(24 * scale))]


def multi_turn(draw: Draw, scale: float) -> list[Call]:
    """Return the calls of multi-turn: one chain of calls for each conversation."""

    def converse(tokens: TokenIds, num_turns: int) -> Call:
        followers = () if num_turns == 1 else (converse(draw.tokens(20, 300), num_turns - 1),)
        return Call(tokens, draw.number(16, 96), followers)

    systems = [draw.tokens(150, 250) for _ in range(4)]
    first = [np.concatenate([systems[i % 4], draw.tokens(20, 300)]) for i in range(round(160 * scale))]
    return [converse(tokens, num_turns=6) for tokens in first]


WORKLOADS: dict[str, Callable[[Draw, float], list[Call]]] = {
    "few-shot": few_shot,
    "tree-of-thought": tree_of_thought,
    "multi-turn": multi_turn,
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one run of one policy.

    Attributes:
        hit_rate: share of the prompt tokens that were not computed.
        late_s: longest time in seconds by which an admission exceeded `max_wait_s`; 0 if no admission did.
        out_of_turn: number of admissions before an aged request that arrived earlier.
        duration_s: duration of the run in seconds, in simulated time.
    """

    hit_rate: float
    retractions: int
    aged: int
    late_s: float
    out_of_turn: int
    duration_s: float


@dataclass(slots=True)
class Simulation:
    """A simulation that runs one workload through one scheduler."""

    calls: list[Call]
    kv_tokens: int
    policy: SchedulingPolicy
    page_size: int = 1
    num_rows: int = NUM_ROWS
    now: float = 0.0
    num_computed: int = 0
    num_prompt_tokens: int = 0
    finished: list[Request] = field(default_factory=list)
    _live: dict[str, tuple[Request, Call]] = field(default_factory=dict)
    _ids: Iterator[int] = field(default_factory=itertools.count)
    _late_s: float = 0.0
    _out_of_turn: int = 0
    _scheduler: Scheduler = field(init=False)
    _device: FakeDevice = field(init=False)

    def run(self) -> Outcome:
        """Run until all requests have finished."""
        num_pages = self.kv_tokens // self.page_size
        cache = RadixCache(CacheContext(self.page_size, LRU(), self.clock))
        kv = KVManager(PagePool(num_pages), cache, RequestTable(self.num_rows, num_pages), self.page_size)
        num_calls = sum(call.count() for call in self.calls)
        self._scheduler = Scheduler(kv, self.policy, SchedulerLimits(num_calls, PREFILL_TOKENS), self.clock)
        self._device = FakeDevice(num_pages, self.page_size, self.num_rows, VOCAB_SIZE)
        for call in self.calls:
            self._ask(call, call.tokens)
        while self._scheduler.has_work:
            self._step()
        counters = self._scheduler.counters
        return Outcome(
            1 - self.num_computed / self.num_prompt_tokens,
            counters.retractions,
            counters.aged_requests,
            self._late_s,
            self._out_of_turn,
            self.now,
        )

    def clock(self) -> float:
        """Return the simulated time."""
        return self.now

    def _ask(self, call: Call, prompt: TokenIds) -> None:
        name = f"r{next(self._ids)}"
        request = Request(name, prompt, PARAMS, call.num_output_tokens, frozenset(), seed=0, arrival_s=self.now)
        self._live[name] = request, call
        self.num_prompt_tokens += len(prompt)
        self._scheduler.add(request)

    def _step(self) -> None:
        waiting = [request for request, _ in self._live.values() if request.row is None]
        plan = self._scheduler.plan()
        if plan is None:
            raise RuntimeError("nothing can run, and nothing will arrive")
        self._check_turns(waiting)
        num_computed = plan.num_tokens - len(plan.device_idx)  # without decode rows, whose input was sampled
        self.now += STEP_S + TOKEN_S * num_computed
        self.num_computed += num_computed
        for update in self._scheduler.commit(plan, self._device.run(plan)):
            if update.finish is not None:
                self._end(update)

    def _check_turns(self, waiting: list[Request]) -> None:
        """Update `late_s` and `out_of_turn` with the requests that a step has admitted."""
        limit_s = self.policy.max_wait_s
        if limit_s is None:
            return
        aged = [r for r in waiting if r.passed_over_s is not None and self.now - r.passed_over_s >= limit_s]
        for request in aged:
            if request.passed_over_s is not None:
                self._late_s = max(self._late_s, self.now - request.passed_over_s - limit_s)
        first_left = min((r.arrival_s for r in aged if r.row is None and not r.num_in_flight), default=None)
        if first_left is not None:
            self._out_of_turn += sum(r.row is not None and r.arrival_s > first_left for r in waiting)

    def _end(self, update: RequestUpdate) -> None:
        request, call = self._live.pop(update.request_id)
        self.finished.append(request)
        for follower in call.followers:
            self._ask(follower, np.concatenate([request.token_ids, follower.tokens]))


def optimum(requests: list[Request], page_size: int) -> tuple[float, int]:
    """Return the hit rate if every distinct prefix is computed once, and the number of distinct tokens."""
    cache = RadixCache(CacheContext(page_size, LRU(), lambda: 0.0))
    fresh = itertools.count()
    num_hits = 0
    for request in sorted(requests, key=lambda request: request.finished_s or 0.0):
        num_hits += cache.probe(PrefixKey(request.prompt_token_ids[:-1])) * page_size
        key = PrefixKey(request.token_ids[:-1])
        match = cache.match(key)
        num_new = len(key.token_ids) // page_size - len(match.pages)
        cache.insert(key, np.fromiter(itertools.islice(fresh, num_new), dtype=np.int32), match.handle)
    return num_hits / sum(request.prompt_len for request in requests), next(fresh) * page_size


@dataclass(frozen=True, slots=True)
class Row:
    """The results of one policy with one workload and one memory size: means over several seeds."""

    workload: str
    policy: str
    kv_tokens: int
    memory_share: float
    hit_rate: float
    optimal_hit_rate: float
    share_of_optimum: float
    worst_share_of_optimum: float
    retractions: float
    aged: float
    late_s: float
    out_of_turn: int
    duration_s: float


def create(name: str, seed: int, max_wait_s: float) -> SchedulingPolicy:
    """Return a policy with default options, except for `max_wait_s`."""
    provider = PROVIDERS[name]
    options = {"max_wait_s": max_wait_s} if "max_wait_s" in provider.options.model_fields else {}
    return provider.create(provider.options(**options), SchedulingContext(seed))


def measure(workload: str, policies: list[str], settings: "Settings") -> Iterator[Row]:
    """Run some policies on one workload, at every memory size."""
    drawn = [WORKLOADS[workload](Draw(seed), settings.scale) for seed in range(settings.seeds)]
    best = []
    for calls in drawn:
        unlimited = Simulation(
            calls, count_tokens(calls, 0), create("fcfs", 0, settings.max_wait_s), settings.page_size
        )
        unlimited.run()
        best.append(optimum(unlimited.finished, settings.page_size))
    num_distinct = min(distinct for _, distinct in best)
    for share in settings.memory:
        kv_tokens = round(share * num_distinct)
        for policy in policies:
            runs = [
                Simulation(
                    calls, kv_tokens, create(policy, seed, settings.max_wait_s), settings.page_size, settings.rows
                ).run()
                for seed, calls in enumerate(drawn)
            ]
            yield summarize(workload, policy, kv_tokens, share, runs, [rate for rate, _ in best])


def count_tokens(calls: list[Call] | tuple[Call, ...], before: int) -> int:
    """Return the sum of the lengths of all calls, in tokens; with a memory of this size, nothing is evicted."""
    total = 0
    for call in calls:
        num_tokens = before + len(call.tokens) + call.num_output_tokens
        total += num_tokens + count_tokens(call.followers, num_tokens)
    return total


def summarize(workload: str, policy: str, kv_tokens: int, share: float, runs: list[Outcome], best: list[float]) -> Row:
    """Return the row of one policy, computed from its runs with several seeds."""
    shares = [run.hit_rate / rate for run, rate in zip(runs, best, strict=True)]
    return Row(
        workload=workload,
        policy=policy,
        kv_tokens=kv_tokens,
        memory_share=share,
        hit_rate=mean([run.hit_rate for run in runs]),
        optimal_hit_rate=mean(best),
        share_of_optimum=mean(shares),
        worst_share_of_optimum=min(shares),
        retractions=mean([run.retractions for run in runs]),
        aged=mean([run.aged for run in runs]),
        late_s=max(run.late_s for run in runs),
        out_of_turn=sum(run.out_of_turn for run in runs),
        duration_s=mean([run.duration_s for run in runs]),
    )


def mean(values: Sequence[float]) -> float:
    """Return the arithmetic mean."""
    return float(np.mean(values))


def show(rows: list[Row], settings: "Settings") -> None:
    """Print a table for each workload."""
    for workload in dict.fromkeys(row.workload for row in rows):
        mine = [row for row in rows if row.workload == workload]
        setup = f"{settings.seeds} seeds, {settings.rows} rows, page {settings.page_size}"
        table = Table(title=f"{workload}: optimal hit rate {mine[0].optimal_hit_rate:.1%}; {setup}")
        for column in (
            "memory",
            "policy",
            "hit rate",
            "of optimum",
            "worst seed",
            "aged",
            "late s",
            "out of turn",
            "s",
        ):
            table.add_column(column, justify="left" if column == "policy" else "right")
        for row in mine:
            table.add_row(
                f"{row.kv_tokens:,} ({row.memory_share:.0%})",
                row.policy,
                f"{row.hit_rate:.1%}",
                f"{row.share_of_optimum:.1%}",
                f"{row.worst_share_of_optimum:.1%}",
                f"{row.aged:.0f}",
                f"{row.late_s:.2f}",
                str(row.out_of_turn),
                f"{row.duration_s:.1f}",
            )
        Console(width=120).print(table)


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of the measurement."""

    seeds: int
    scale: float
    page_size: int
    rows: int
    max_wait_s: float
    memory: tuple[float, ...]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the measurement that the command line selects."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="save the figures here")
    parser.add_argument("--seeds", type=int, default=3, help="how often each workload is drawn")
    parser.add_argument("--scale", type=float, default=1.0, help="of the number of requests")
    parser.add_argument("--page-size", type=int, default=1)
    parser.add_argument("--rows", type=int, default=NUM_ROWS, help="requests that run at once")
    parser.add_argument("--max-wait", type=float, default=MAX_WAIT_S, help="in simulated seconds")
    parser.add_argument("--memory", type=float, nargs="+", default=MEMORY_SHARES, help="shares of the distinct tokens")
    parser.add_argument("--policies", nargs="+", choices=PROVIDERS, default=list(PROVIDERS))
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    given = parser.parse_args(arguments)
    settings = Settings(given.seeds, given.scale, given.page_size, given.rows, given.max_wait, tuple(given.memory))
    rows = [row for workload in given.workloads for row in measure(workload, given.policies, settings)]
    show(rows, settings)
    if given.json:
        report = {"settings": asdict(settings), "rows": [asdict(row) for row in rows]}
        given.json.parent.mkdir(parents=True, exist_ok=True)
        given.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
