"""Measures the overhead of the server compared with the engine: per request, per token, and in throughput.

    python benchmarks/server_overhead.py [--rounds N] [--scale X] [--model NAME_OR_PATH] [--json FILE]

    single stream   8 requests, one after the other, streamed
    32 streams      32 simultaneous requests, streamed
    single answer   8 requests, one after the other, not streamed
    32 answers      32 simultaneous requests, not streamed

Prompts are 128 random token ids; 64 tokens are generated greedily. In each round, each workload runs on an engine in
this process, and on a `graftlm serve` process that this script starts and calls over HTTP (/generate). Engine and
server alternate; each run starts with an empty prefix cache. A figure is the median over rounds. A ratio is the median
of the rounds' ratios, because a slow moment of the machine affects both sides of a round. The client runs on the same
machine as the server, and its work is part of the server's figures.
"""

import argparse
import asyncio
import json
import statistics
import time
from array import array
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import aiohttp
import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from graftlm import Engine, SamplingParams
from graftlm.bench.answer import Answer
from graftlm.bench.apis import API_TYPES, Event, RequestOptions
from graftlm.bench.client import Client, open_session
from graftlm.bench.prompts import TokenPrompt, WorkItem
from graftlm.bench.report import Environment
from graftlm.bench.target import flush_cache
from graftlm.bench.workload import ordinary_token_ids
from graftlm.testing.server_process import ServerProcess

RESULTS = Path(__file__).parent / "results"
PROMPT_TOKENS = 128
OUTPUT_TOKENS = 64
TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class Reply:
    """The outcome of one request; times are in seconds since it was sent.

    Attributes:
        first_token_s, per_token_s: TTFT and mean inter-token time; None if the answer was not streamed.
        token_ids: generated tokens; None for a stream from the server, because the client does not read the ids.
    """

    total_s: float
    num_tokens: int
    first_token_s: float | None = None
    per_token_s: float | None = None
    token_ids: tuple[int, ...] | None = None


class Subject(Protocol):
    """The interface of both sides: the engine in this process, and the server."""

    async def stream(self, prompt: list[int]) -> Reply:
        """Generate token by token."""
        ...

    async def whole(self, prompt: list[int]) -> Reply:
        """Generate, and return everything at the end."""
        ...

    async def flush(self) -> None:
        """Empty the prefix cache."""
        ...


class InProcess:
    """The engine in this process."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._params = SamplingParams(temperature=0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)

    async def stream(self, prompt: list[int]) -> Reply:
        """Generate token by token."""
        answer = Answer()
        start_s = time.perf_counter()
        async for output in self._engine.astream(prompt, self._params):
            answer.add([Event(output_tokens=len(output.token_ids))], time.perf_counter())
        return streamed(answer.moments_s[0], answer.tpot_s, start_s, answer.output_tokens)

    async def whole(self, prompt: list[int]) -> Reply:
        """Generate, and return everything at the end."""
        start_s = time.perf_counter()
        (output,) = await self._engine.agenerate([prompt], self._params)
        return Reply(time.perf_counter() - start_s, len(output.token_ids), token_ids=output.token_ids)

    async def flush(self) -> None:
        """Empty the prefix cache."""
        await asyncio.to_thread(self._engine.flush_cache)


class Served:
    """The server, over HTTP."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session = session
        self._url = url
        self._client = Client(session, url, API_TYPES["native"](RequestOptions("", 0.0, ignore_eos=True)))

    async def stream(self, prompt: list[int]) -> Reply:
        """Generate token by token."""
        request = self._client.prepare(0, WorkItem(TokenPrompt(array("i", prompt)), OUTPUT_TOKENS))
        start_s = time.perf_counter()
        record = await self._client.send(request, start_s, None)
        if record.failure is not None or record.ttft_s is None:
            raise RuntimeError(f"a request failed: {record.failure}")
        return streamed(start_s + record.sent_s + record.ttft_s, record.tpot_s, start_s, record.output_tokens)

    async def whole(self, prompt: list[int]) -> Reply:
        """Generate, and return everything at the end."""
        sampling = {"temperature": 0, "max_new_tokens": OUTPUT_TOKENS, "ignore_eos": True}
        start_s = time.perf_counter()
        body = {"input_ids": prompt, "sampling_params": sampling}
        async with self._session.post(self._url + "/generate", json=body) as response:
            response.raise_for_status()
            ids = (await response.json())["output_ids"]
        return Reply(time.perf_counter() - start_s, len(ids), token_ids=tuple(ids))

    async def flush(self) -> None:
        """Empty the prefix cache."""
        await flush_cache(self._session, self._url)


def streamed(first_s: float, per_token_s: float | None, start_s: float, num_tokens: int | None) -> Reply:
    """Return the outcome of a stream that ends now."""
    return Reply(time.perf_counter() - start_s, num_tokens or 0, first_s - start_s, per_token_s)


@dataclass(frozen=True, slots=True)
class Replies:
    """The outcomes of a workload's requests.

    Attributes:
        wall_s: wall time from the first request to the last answer, in seconds.
    """

    wall_s: float
    replies: list[Reply]

    @property
    def tokens_per_s(self) -> float:
        """Number of generated tokens per second."""
        return sum(reply.num_tokens for reply in self.replies) / self.wall_s

    def median_ms(self, seconds: Callable[[Reply], float | None]) -> float:
        """Return the median of a time over the requests, in milliseconds."""
        values = [value for value in map(seconds, self.replies) if value is not None]
        return 1e3 * statistics.median(values)


@dataclass(frozen=True, slots=True)
class Workload:
    """A list of requests, and the way in which they are sent."""

    name: str
    prompts: list[list[int]]
    at_once: bool
    streams: bool

    async def run(self, subject: Subject) -> Replies:
        """Run the requests on one side, with an empty prefix cache."""
        await subject.flush()
        send = subject.stream if self.streams else subject.whole
        start_s = time.perf_counter()
        if self.at_once:
            replies = list(await asyncio.gather(*map(send, self.prompts)))
        else:
            replies = [await send(prompt) for prompt in self.prompts]
        return Replies(time.perf_counter() - start_s, replies)

    @property
    def figures(self) -> "dict[str, Callable[[Replies], float]]":
        """The figures of the workload: name with unit -> function that computes it."""
        if self.at_once:
            return {"output tokens/s": lambda r: r.tokens_per_s}
        total: dict[str, Callable[[Replies], float]] = {"end to end, ms": lambda r: r.median_ms(lambda x: x.total_s)}
        if not self.streams:
            return total
        return {
            "first token, ms": lambda r: r.median_ms(lambda x: x.first_token_s),
            "per later token, ms": lambda r: r.median_ms(lambda x: x.per_token_s),
        } | total


@dataclass(frozen=True, slots=True)
class Row:
    """One figure of both sides; lists have a value for each round.

    Attributes:
        ratio: the server's value divided by the engine's; `ratio_min` and `ratio_max` are its range over the rounds.
        difference: the server's value minus the engine's.
    """

    workload: str
    figure: str
    in_process: float
    served: float
    ratio: float
    ratio_min: float
    ratio_max: float
    difference: float
    in_process_rounds: list[float]
    served_rounds: list[float]

    @classmethod
    def of(cls, workload: str, figure: str, in_process: list[float], served: list[float]) -> "Row":
        """Return a row with medians and ratios, computed from the values of all rounds."""
        pairs = list(zip(in_process, served, strict=True))
        return cls(
            workload=workload,
            figure=figure,
            in_process=statistics.median(in_process),
            served=statistics.median(served),
            ratio=statistics.median(b / a for a, b in pairs),
            ratio_min=min(b / a for a, b in pairs),
            ratio_max=max(b / a for a, b in pairs),
            difference=statistics.median(b - a for a, b in pairs),
            in_process_rounds=in_process,
            served_rounds=served,
        )


@dataclass(frozen=True, slots=True)
class Result:
    """The figures, and a comparison of the generated tokens.

    Attributes:
        same_tokens: number of the server's unstreamed answers whose tokens equal those of the engine.
    """

    rows: list[Row]
    same_tokens: int
    compared: int


def workloads(vocab_size: int, scale: float, seed: int) -> list[Workload]:
    """Return the workloads; a streamed workload and an unstreamed one of the same size have the same prompts."""
    rng = np.random.default_rng(seed)
    ids = ordinary_token_ids(vocab_size)

    def prompts(full: int) -> list[list[int]]:
        count = max(1, round(full * scale))
        return [list(map(int, rng.integers(ids.start, ids.stop, size=PROMPT_TOKENS))) for _ in range(count)]

    few, many = prompts(8), prompts(32)
    return [
        Workload("single stream", few, at_once=False, streams=True),
        Workload(f"{len(many)} streams", many, at_once=True, streams=True),
        Workload("single answer", few, at_once=False, streams=False),
        Workload(f"{len(many)} answers", many, at_once=True, streams=False),
    ]


async def compare(in_process: Subject, served: Subject, works: Sequence[Workload], num_rounds: int) -> Result:
    """Run every workload on both sides, alternately; the first round is not counted."""
    rows: list[Row] = []
    same = compared = 0
    for work in works:
        rounds: list[tuple[Replies, Replies]] = []
        for i in range(num_rounds + 1):
            if i % 2:
                theirs, ours = await work.run(served), await work.run(in_process)
            else:
                ours, theirs = await work.run(in_process), await work.run(served)
            rounds.append((ours, theirs))
        for figure, value_of in work.figures.items():
            values = [(value_of(ours), value_of(theirs)) for ours, theirs in rounds[1:]]
            rows.append(Row.of(work.name, figure, [a for a, _ in values], [b for _, b in values]))
        if not work.streams:
            pairs = [pair for a, b in rounds for pair in zip(a.replies, b.replies, strict=True)]
            compared += len(pairs)
            same += sum(a.token_ids == b.token_ids for a, b in pairs)
    return Result(rows, same, compared)


@asynccontextmanager
async def subjects(model: str) -> AsyncIterator[tuple[InProcess, Served, int]]:
    """Start the engine and the server; yield both, and the size of the model's vocabulary."""
    config: dict[str, Any] = {"model": model, "memory": {"kv_tokens": 16384}}
    with ServerProcess(config) as server, Engine(config) as engine:
        async with open_session(None, TIMEOUT_S) as session:
            yield InProcess(engine), Served(session, server.url), engine.model_config.vocab_size


async def measure(arguments: argparse.Namespace) -> Result:
    async with subjects(arguments.model) as (in_process, served, vocab_size):
        works = workloads(vocab_size, arguments.scale, arguments.seed)
        return await compare(in_process, served, works, arguments.rounds)


def show(result: Result, title: str) -> None:
    table = Table(title=title, caption=f"{result.same_tokens} of {result.compared} whole answers have the same tokens")
    table.add_column("workload")
    table.add_column("")
    for column in ("in process", "served", "difference", "ratio", "of rounds"):
        table.add_column(column, justify="right")
    for row in result.rows:
        numbers = (f"{row.in_process:,.2f}", f"{row.served:,.2f}", f"{row.difference:+,.2f}", f"{row.ratio:.2f}x")
        numbers += (f"{row.ratio_min:.2f} to {row.ratio_max:.2f}",)
        table.add_row(row.workload, row.figure, *numbers)
    Console(width=120).print(table)


def save(path: Path, arguments: argparse.Namespace, environment: Environment, result: Result) -> None:
    content = {
        "environment": asdict(environment) | {"torch": torch.__version__, "threads": torch.get_num_threads()},
        "model": arguments.model,
        "prompt_tokens": PROMPT_TOKENS,
        "output_tokens": OUTPUT_TOKENS,
        "rounds": arguments.rounds,
        "scale": arguments.scale,
        "seed": arguments.seed,
        **asdict(result),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    print(f"saved as {path}")


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--model", default="demo", help="name or folder of the checkpoint")
    made.add_argument("--rounds", type=int, default=7, help="that count; one more goes before them")
    made.add_argument("--scale", type=float, default=1.0, help="factor on the number of requests")
    made.add_argument("--seed", type=int, default=0, help="of the prompts")
    made.add_argument(
        "--json", type=Path, help="where to save; default: results/server-overhead-MODEL.json beside this"
    )
    return made


def main(argv: Sequence[str] | None = None) -> None:
    arguments = parser().parse_args(argv)
    environment = Environment.now()
    result = asyncio.run(measure(arguments))
    name = Path(arguments.model).name
    show(result, f"{name}: what the server adds, medians of {arguments.rounds} rounds")
    save(arguments.json or RESULTS / f"server-overhead-{name}.json", arguments, environment, result)


if __name__ == "__main__":
    main()
