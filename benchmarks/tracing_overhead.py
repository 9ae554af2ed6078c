"""Measures what traces cost: a server that exports every request, compared with the same server without traces.

    python benchmarks/tracing_overhead.py [--rounds N] [--requests N] [--model NAME_OR_PATH] [--json FILE]

Two servers of the same configuration run at the same time; one of them exports the spans of all requests to a collector
in this process. In each round, 32 streams send the same requests to one server and then to the other. The order
alternates, and prefix caches are empty. Prompts are 128 random token ids; 64 tokens are generated greedily.

Two figures are measured per round: the time until all requests have ended, and the CPU time of all processes of the
server. A ratio is the median of the rounds' ratios. The exit status is 1 if the ratio of the times is above the limit.
The client and the collector run on the same machine, so run nothing else on it.
"""

import argparse
import asyncio
import json
import statistics
import sys
import time
from array import array
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import psutil
from rich.console import Console
from rich.table import Table

from graftlm.bench.apis import API_TYPES, RequestOptions
from graftlm.bench.client import Client, open_session
from graftlm.bench.prompts import TokenPrompt, WorkItem
from graftlm.bench.report import Environment
from graftlm.bench.target import flush_cache
from graftlm.bench.workload import ordinary_token_ids
from graftlm.checkpoint import load_model_config, resolve_checkpoint
from graftlm.testing.server_process import ServerProcess
from graftlm.testing.trace_collector import TraceCollector

RESULTS = Path(__file__).parent / "results" / "tracing-overhead.json"
PROMPT_TOKENS = 128
OUTPUT_TOKENS = 64
NUM_STREAMS = 32
TIMEOUT_S = 600.0
MAX_RATIO = 1.02


@dataclass(frozen=True, slots=True)
class Round:
    """One run of all requests on one server: wall time, and CPU time of the server's processes."""

    wall_s: float
    cpu_s: float


@dataclass(frozen=True, slots=True)
class Ratio:
    """A figure with and without traces; lists have a value for each round.

    Attributes:
        ratio: median of the ratios of the rounds; `ratio_min` and `ratio_max` are their range.
    """

    figure: str
    untraced: float
    traced: float
    ratio: float
    ratio_min: float
    ratio_max: float
    untraced_rounds: list[float]
    traced_rounds: list[float]

    @classmethod
    def of(cls, figure: str, untraced: list[float], traced: list[float]) -> "Ratio":
        """Compute the medians."""
        ratios = [b / a for a, b in zip(untraced, traced, strict=True)]
        return cls(
            figure=figure,
            untraced=statistics.median(untraced),
            traced=statistics.median(traced),
            ratio=statistics.median(ratios),
            ratio_min=min(ratios),
            ratio_max=max(ratios),
            untraced_rounds=untraced,
            traced_rounds=traced,
        )


class Served:
    """One of the servers."""

    def __init__(self, session: aiohttp.ClientSession, server: ServerProcess) -> None:
        self._session = session
        self._url = server.url
        self._process = psutil.Process(server.process.pid)
        self._client = Client(session, server.url, API_TYPES["native"](RequestOptions("", 0.0, ignore_eos=True)))

    async def run(self, prompts: Sequence[list[int]]) -> Round:
        """Send all prompts in `NUM_STREAMS` streams."""
        await flush_cache(self._session, self._url)
        waiting = iter(prompts)

        async def stream() -> None:
            for prompt in waiting:
                request = self._client.prepare(0, WorkItem(TokenPrompt(array("i", prompt)), OUTPUT_TOKENS))
                record = await self._client.send(request, time.perf_counter(), None)
                if record.failure is not None:
                    raise RuntimeError(f"a request failed: {record.failure}")

        start_s, start_cpu_s = time.perf_counter(), self._cpu_s()
        await asyncio.gather(*(stream() for _ in range(NUM_STREAMS)))
        return Round(time.perf_counter() - start_s, self._cpu_s() - start_cpu_s)

    def _cpu_s(self) -> float:
        total = 0.0
        for process in [self._process, *self._process.children(recursive=True)]:
            times = process.cpu_times()
            total += times.user + times.system
        return total


def draw_prompts(model: str, num_requests: int, seed: int) -> list[list[int]]:
    """Return random prompts."""
    rng = np.random.default_rng(seed)
    ids = ordinary_token_ids(load_model_config(resolve_checkpoint(model)).vocab_size)
    return [list(map(int, rng.integers(ids.start, ids.stop, size=PROMPT_TOKENS))) for _ in range(num_requests)]


@asynccontextmanager
async def subjects(model: str, collector: TraceCollector) -> AsyncIterator[tuple[Served, Served]]:
    """Start both servers; yield the one without traces and the one with traces."""
    config: dict[str, Any] = {"model": model, "memory": {"kv_tokens": 16384}}
    off = config | {"server": {"traces": {"enabled": False}}}
    on = config | {"server": {"traces": {"endpoint": collector.url, "sample_ratio": 1.0}}}
    with ServerProcess(off) as untraced, ServerProcess(on) as traced:
        async with open_session(None, TIMEOUT_S) as session:
            yield Served(session, untraced), Served(session, traced)


async def measure(arguments: argparse.Namespace, collector: TraceCollector) -> list[Ratio]:
    """Run all rounds, after one that is not counted."""
    prompts = draw_prompts(arguments.model, arguments.requests, arguments.seed)
    rounds: list[tuple[Round, Round]] = []
    async with subjects(arguments.model, collector) as (untraced, traced):
        for i in range(arguments.rounds + 1):
            if i % 2:
                on, off = await traced.run(prompts), await untraced.run(prompts)
            else:
                off, on = await untraced.run(prompts), await traced.run(prompts)
            rounds.append((off, on))
    counted = rounds[1:]
    return [
        Ratio.of("wall time, s", [off.wall_s for off, _ in counted], [on.wall_s for _, on in counted]),
        Ratio.of("CPU time, s", [off.cpu_s for off, _ in counted], [on.cpu_s for _, on in counted]),
    ]


def show(ratios: Sequence[Ratio], title: str) -> None:
    table = Table(title=title)
    table.add_column("")
    for column in ("without traces", "with traces", "ratio", "of rounds"):
        table.add_column(column, justify="right")
    for row in ratios:
        spread = f"{row.ratio_min:.3f} to {row.ratio_max:.3f}"
        table.add_row(row.figure, f"{row.untraced:.3f}", f"{row.traced:.3f}", f"{row.ratio:.3f}", spread)
    Console(width=100).print(table)


def save(path: Path, arguments: argparse.Namespace, environment: Environment, ratios: Sequence[Ratio]) -> None:
    content = {
        "environment": asdict(environment),
        "model": arguments.model,
        "prompt_tokens": PROMPT_TOKENS,
        "output_tokens": OUTPUT_TOKENS,
        "streams": NUM_STREAMS,
        "requests": arguments.requests,
        "rounds": arguments.rounds,
        "seed": arguments.seed,
        "rows": [asdict(row) for row in ratios],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    print(f"saved as {path}")


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--model", default="demo", help="name or folder of the checkpoint")
    made.add_argument("--rounds", type=int, default=9, help="rounds that count; one more runs before them")
    made.add_argument("--requests", type=int, default=128, help="requests per round and server")
    made.add_argument("--seed", type=int, default=0, help="of the prompts")
    made.add_argument("--max-ratio", type=float, default=MAX_RATIO, help="limit of the ratio of the times")
    made.add_argument("--json", type=Path, default=RESULTS, help="where to save the figures")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parser().parse_args(argv)
    environment = Environment.now()
    with TraceCollector(decodes=False) as collector:
        ratios = asyncio.run(measure(arguments, collector))
        if not collector.num_bytes:
            raise RuntimeError("the collector received no spans")
    show(ratios, f"{Path(arguments.model).name}: the cost of traces, medians of {arguments.rounds} rounds")
    save(arguments.json, arguments, environment, ratios)
    return int(ratios[0].ratio > arguments.max_ratio)


if __name__ == "__main__":
    sys.exit(main())
