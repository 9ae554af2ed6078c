"""Measures how much each part of the system speeds up LM programs: compares the full system with variants.

    python benchmarks/lang_ablation.py [--rounds N] [--scale X] [--only NAME ...] [--json FILE] [--plot FILE]

Many runs of each of four `graftlm.lang` programs are executed at the same time on the bundled model. The KV memory has
room for only a part of the common prefixes. The first list has the programs, the second one the variants:

    tree of thought   three thoughts after each thought, three levels deep, after one instruction
    LLM judge         an essay judged in six dimensions in parallel, and a verdict on the judgments
    few-shot          questions after the examples of their tasks, in random order
    multi-turn        chats of four turns

    full              radix cache, longest prefix first, parallel forks, hints before forks
    full again        equal to "full"; shows the difference between equal variants
    no cache          every request computes its whole prompt
    no tree           a table of whole prefixes: a common prefix is found only if a request ended there
    FCFS, random      requests run in the order of arrival, or in random order
    no parallelism    a program sends one request at a time; programs still run in parallel
    no hint           the children of a fork start before their common prefix is cached

The setup follows figure 8 of Zheng et al., arXiv:2312.07104. Texts have fixed lengths, so every variant does the same
work. In each round the variants run in another order, and each run begins with an empty cache. Figures are medians over
rounds. On a machine with other load, CPU time (of all threads of this process) is more reliable than wall time.

Each run of a variant is compared with each run of "full". The variant is significantly faster if it was faster in nine
of ten such pairs. With five rounds, this happens by chance to one of two equal variants about once in a hundred times.
"""

import argparse
import asyncio
import json
import random
import statistics
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, ExitStack, nullcontext
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from flat_table import TablePlugin
from lang_programs import WORKLOADS, Workload
from rich.console import Console
from rich.table import Table

from graftlm import Engine
from graftlm.bench.machine import Machine
from graftlm.lang import Backend, EngineBackend
from graftlm.lang.backend import Generation, GenerationRequest
from graftlm.lang.chat_template import ChatTemplate
from graftlm.lang.choices import ChoiceScore
from graftlm.records import EngineStats

RESULTS = Path(__file__).parent / "results"


# -- Variants ----------------------------------------------------------------------------------------------------------


class Restrained:
    """A backend for one run of a program, without the language features that the variant leaves out."""

    def __init__(self, backend: Backend, has_hints: bool, is_parallel: bool) -> None:
        self._backend, self._has_hints = backend, has_hints
        self._turn: AbstractAsyncContextManager[Any] = nullcontext() if is_parallel else asyncio.Lock()

    async def generate(self, request: GenerationRequest) -> list[Generation]:
        """Complete a prompt; see Backend."""
        async with self._turn:
            return await self._backend.generate(request)

    async def stream(self, request: GenerationRequest) -> AsyncGenerator[Generation, None]:
        """Complete a prompt, and yield the growing completion; see Backend."""
        async with self._turn:
            async for generation in self._backend.stream(request):
                yield generation

    async def score(self, prompt: str, choices: Sequence[str], **options: Any) -> list[ChoiceScore]:
        """Return the likelihood of each choice; see Backend."""
        async with self._turn:
            return await self._backend.score(prompt, choices, **options)

    async def cache_prefix(self, prompt: str) -> None:
        """Cache a prompt, if the variant has hints; see Backend."""
        if self._has_hints:
            async with self._turn:
                await self._backend.cache_prefix(prompt)

    async def chat_template(self) -> ChatTemplate:
        """Return the chat template; see Backend."""
        return await self._backend.chat_template()

    async def flush_cache(self) -> None:
        """Remove all cached prefixes; see Backend."""
        await self._backend.flush_cache()


@dataclass(frozen=True, slots=True)
class Variant:
    """The settings of an engine and of the language."""

    cache: str = "radix"
    policy: str = "lpm"
    has_hints: bool = True
    is_parallel: bool = True


FULL, AGAIN = "full", "full again"
BEYOND_NOISE = 0.9
VARIANTS = {
    FULL: Variant(),
    AGAIN: Variant(),
    "no cache": Variant(cache="chunk"),
    "no tree": Variant(cache="whole_prefix_table"),
    "FCFS": Variant(policy="fcfs"),
    "random": Variant(policy="random"),
    "no parallelism": Variant(is_parallel=False),
    "no hint": Variant(has_hints=False),
}


# -- Measuring ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Run:
    """One run of one variant on one workload.

    Attributes:
        wall_s, cpu_s: wall time and CPU time of all threads, from the first request to the last answer.
        computed_tokens: number of prompt tokens that were not found in the cache, including hints and retractions.
        steps, retractions: number of steps and number of retractions.
    """

    wall_s: float
    cpu_s: float
    computed_tokens: int
    steps: int
    retractions: int


@dataclass(frozen=True, slots=True)
class Row:
    """The results of a variant on a workload over all rounds.

    Attributes:
        wall_s, cpu_s, computed_tokens, steps, retractions: medians over the runs.
        times_full, cpu_times_full: the medians divided by those of "full"; above 1, "full" is faster.
        faster, cpu_faster: share of the pairs (run of the variant, run of "full") in which the variant was faster.
    """

    workload: str
    variant: str
    wall_s: float
    cpu_s: float
    times_full: float
    cpu_times_full: float
    computed_tokens: int
    steps: int
    retractions: int
    faster: float
    cpu_faster: float
    rounds: list[Run] = field(default_factory=list)


def measure(engine: Engine, variant: Variant, workload: Workload, scale: float) -> Run:
    """Run a workload on an engine whose cache is empty."""
    runs = workload.draw(random.Random(0), scale)
    backend = EngineBackend(engine)

    def run(arguments: Mapping[str, Any]) -> None:
        own = Restrained(backend, variant.has_hints, variant.is_parallel)
        workload.program.run(**arguments, backend=own, temperature=0, ignore_eos=True)

    engine.flush_cache()
    before, wall, cpu = engine.stats(), time.perf_counter(), time.process_time()
    with ThreadPoolExecutor(len(runs)) as pool:
        list(pool.map(run, runs))
    return to_run(time.perf_counter() - wall, time.process_time() - cpu, before, engine.stats())


def to_run(wall_s: float, cpu_s: float, before: EngineStats, after: EngineStats) -> Run:
    prompt, cached, retracted = (
        getattr(after, name) - getattr(before, name) for name in ("prompt_tokens", "cached_tokens", "retracted_tokens")
    )
    retractions = after.retractions - before.retractions
    return Run(wall_s, cpu_s, prompt - cached + retracted, after.steps - before.steps, retractions)


def compare(
    engines: Mapping[str, Engine], workloads: Sequence[str], variants: Sequence[str], num_rounds: int, scale: float
) -> list[Row]:
    """Run every variant on every workload in each round."""
    rng = random.Random(1)
    rows = []
    for workload in workloads:
        taken: dict[str, list[Run]] = {name: [] for name in variants}
        for _ in range(num_rounds):
            for name in rng.sample(list(variants), len(variants)):
                taken[name].append(measure(engines[name], VARIANTS[name], WORKLOADS[workload], scale))
        rows += summarize(workload, taken)
    return rows


def summarize(workload: str, taken: Mapping[str, list[Run]]) -> list[Row]:
    """Return a row for each variant. `taken` is variant -> runs; it must contain `full` and `full again`."""
    full = taken[FULL] + taken[AGAIN]
    return [summarize_variant(workload, name, runs, full) for name, runs in taken.items()]


def summarize_variant(workload: str, name: str, runs: list[Run], full: list[Run]) -> Row:
    """Return a variant's row. `full` contains the runs of "full" and of "full again"."""

    def median(field_name: str, of: list[Run] = runs) -> float:
        return float(statistics.median([getattr(run, field_name) for run in of]))

    def share_faster(field_name: str) -> float:
        pairs: list[tuple[float, float]]
        pairs = [(getattr(run, field_name), getattr(other, field_name)) for run in runs for other in full]
        return sum(own < others for own, others in pairs) / len(pairs)

    return Row(
        workload=workload,
        variant=name,
        wall_s=median("wall_s"),
        cpu_s=median("cpu_s"),
        times_full=median("wall_s") / median("wall_s", full),
        cpu_times_full=median("cpu_s") / median("cpu_s", full),
        computed_tokens=round(median("computed_tokens")),
        steps=round(median("steps")),
        retractions=round(median("retractions")),
        faster=share_faster("wall_s"),
        cpu_faster=share_faster("cpu_s"),
        rounds=runs,
    )


def show(rows: Sequence[Row]) -> None:
    """Print a table, and the cases in which a variant was significantly faster than "full"."""
    table = Table(title="LM programs without one part; times are medians, and those of full are 1")
    for column in ("program", "without", "wall s", "times full", "cpu times full", "computed", "steps", "retracted"):
        table.add_column(column, justify="left" if column in ("program", "without") else "right")
    for row in rows:
        table.add_row(
            row.workload if row.variant == FULL else "",
            row.variant,
            f"{row.wall_s:.2f}",
            f"{row.times_full:.2f}",
            f"{row.cpu_times_full:.2f}",
            f"{row.computed_tokens:,}",
            f"{row.steps:,}",
            f"{row.retractions:,}",
            end_section=row.variant == rows[-1].variant,
        )
    console = Console(width=120)
    console.print(table)
    for row in rows:
        for what, share, times in (
            ("time", row.faster, row.times_full),
            ("processor time", row.cpu_faster, row.cpu_times_full),
        ):
            if share >= BEYOND_NOISE and row.variant != AGAIN:
                console.print(f"{row.workload}: {row.variant} beats full beyond noise: {times:.2f} of its {what}")


def plot(rows: Sequence[Row], path: Path) -> None:
    """Draw the work per second of CPU time for each workload; needs matplotlib."""
    from matplotlib.figure import Figure

    workloads = list(dict.fromkeys(row.workload for row in rows))
    variants = list(dict.fromkeys(row.variant for row in rows if row.variant != AGAIN))
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    axes = figure.subplots()
    for i, variant in enumerate(variants):
        heights = [1 / row.cpu_times_full for row in rows if row.variant == variant]
        places = [j + (i - len(variants) / 2 + 0.5) * 0.8 / len(variants) for j in range(len(workloads))]
        axes.bar(places, heights, width=0.8 / len(variants), label=variant)
    axes.set_xticks(range(len(workloads)), workloads)
    axes.set_ylabel("programs per processor\nsecond, full = 1")
    axes.axhline(1, color="black", linewidth=0.5)
    axes.legend(ncols=len(variants), fontsize="small", loc="lower center", bbox_to_anchor=(0.5, 1), frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def open_engines(stack: ExitStack, names: Sequence[str], given: argparse.Namespace) -> dict[str, Engine]:
    """Return each variant's engine; variants with the same engine settings share one."""
    engines: dict[tuple[str, str], Engine] = {}
    for variant in [VARIANTS[name] for name in names]:
        if (variant.cache, variant.policy) not in engines:
            engine = Engine(
                model=given.model,
                plugins=[TablePlugin()],
                cache={"name": variant.cache},
                scheduling={"policy": {"name": variant.policy}, "max_running_requests": given.rows},
                memory={"kv_tokens": given.kv_tokens},
            )
            engines[variant.cache, variant.policy] = stack.enter_context(engine)
    return {name: engines[VARIANTS[name].cache, VARIANTS[name].policy] for name in names}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--scale", type=float, default=1.0, help="factor on the number of programs")
    parser.add_argument("--only", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS)[2:], default=list(VARIANTS)[2:])
    parser.add_argument("--kv-tokens", type=int, default=2048, help="the engines' memory")
    parser.add_argument("--rows", type=int, default=16, help="requests that run at a time")
    parser.add_argument("--json", type=Path, default=RESULTS / "lang_ablation.json")
    parser.add_argument("--plot", type=Path)
    given = parser.parse_args(arguments)
    if given.plot and find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib: pip install 'graftlm[plot]'")
    started = time.perf_counter()
    names = [FULL, AGAIN, *given.variants]
    with ExitStack() as stack:
        engines = open_engines(stack, names, given)
        rows = compare(engines, given.only, names, given.rounds, given.scale)
    show(rows)
    print(f"{time.perf_counter() - started:.0f} s in all")
    given.json.parent.mkdir(parents=True, exist_ok=True)
    settings = {"model": given.model, "scale": given.scale, "kv_tokens": given.kv_tokens, "rows": given.rows}
    report = {"machine": asdict(Machine.here()), "settings": settings, "rows": [asdict(row) for row in rows]}
    given.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if given.plot:
        plot(rows, given.plot)


if __name__ == "__main__":
    main()
