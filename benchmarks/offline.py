"""Measures the in-process engine through its public interface, one workload after the other, without a server.

    python benchmarks/offline.py [--model NAME_OR_PATH] [--workload NAME ...] [--scale X] [--set cache.page_size=16 ...]
    python benchmarks/offline.py --compare cache.name=chunk

    shared-prefix   64 requests at once: a common prompt of 1,024 tokens, 64 of their own, 16 to generate
    multi-turn      8 conversations of 4 turns: 128 tokens more each turn, 64 to generate, the history sent again
    unshared        32 requests at once: 64 to 512 tokens of their own, 16 to 128 to generate
    single-stream   1 request at a time, 3 in all: 512 tokens, 128 to generate

Prompts are random token ids; generation is greedy and of fixed length. Lengths shrink where the model's context is
shorter. Each workload starts with an empty prefix cache. With --compare, a second engine with those settings runs each
workload in turn with the first, so that both meet the machine in the same state; the fastest run of each counts.
"""

import argparse
import json
import os
import platform
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

import graftlm
from graftlm import Engine, RequestOutput, SamplingParams
from graftlm.records import EngineStats

RESULTS = Path(__file__).parent / "results"
#: Token ids below this are not drawn: many tokenizers keep their special tokens there.
FIRST_TOKEN_ID = 300
FULL_CONTEXT = 1104


@dataclass(frozen=True, slots=True)
class Size:
    """How much of a workload to run.

    Attributes:
        requests: factor on the number of requests.
        lengths: factor on their lengths, at most 1.
    """

    requests: float
    lengths: float

    @classmethod
    def of(cls, scale: float, context_len: int) -> "Size":
        """Scale the number of requests, and fit their lengths into the model's context."""
        return cls(scale, min(1.0, context_len / FULL_CONTEXT))

    def count(self, full: int) -> int:
        """Return how many requests stand for `full`."""
        return max(1, round(full * self.requests))

    def tokens(self, full: int) -> int:
        """Return how many tokens stand for `full`."""
        return max(2, int(full * self.lengths))


@dataclass(frozen=True, slots=True)
class Run:
    """One workload on one engine.

    Attributes:
        variant: "base", or the settings that `--compare` gives.
        ttft_*, tpot_*: time to the first token, and per token after it, over requests.
        cache_hit_rate: prompt tokens that were not computed, of all.
        host_ms_per_step: planning and committing; beside the model's time when steps overlap.
    """

    workload: str
    variant: str
    requests: int
    input_tokens: int
    output_tokens: int
    wall_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    tpot_p50_ms: float
    tpot_p99_ms: float
    cache_hit_rate: float
    steps: int
    host_ms_per_step: float
    model_ms_per_step: float
    retractions: int


class Prompts:
    """Draws prompts; the same seed draws the same ones."""

    def __init__(self, vocab_size: int, seed: int) -> None:
        self._random = random.Random(seed)
        self._token_ids = range(min(FIRST_TOKEN_ID, vocab_size // 2), vocab_size)

    def draw(self, num_tokens: int) -> list[int]:
        """Return random token ids."""
        return self._random.choices(self._token_ids, k=num_tokens)

    def between(self, low: int, high: int) -> int:
        """Return a number from low to high."""
        return self._random.randint(low, high)


def fixed(num_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)


def shared_prefix(engine: Engine, size: Size, prompts: Prompts) -> list[RequestOutput]:
    common = prompts.draw(size.tokens(1024))
    requests = [common + prompts.draw(size.tokens(64)) for _ in range(size.count(64))]
    return engine.generate(requests, fixed(size.tokens(16)), progress=False)


def multi_turn(engine: Engine, size: Size, prompts: Prompts) -> list[RequestOutput]:
    histories: list[list[int]] = [[] for _ in range(size.count(8))]
    outputs: list[RequestOutput] = []
    for _ in range(4):
        histories = [history + prompts.draw(size.tokens(128)) for history in histories]
        turn = engine.generate(histories, fixed(size.tokens(64)), progress=False)
        histories = [history + list(output.token_ids) for history, output in zip(histories, turn, strict=True)]
        outputs += turn
    return outputs


def unshared(engine: Engine, size: Size, prompts: Prompts) -> list[RequestOutput]:
    count = size.count(32)
    requests = [prompts.draw(prompts.between(size.tokens(64), size.tokens(512))) for _ in range(count)]
    params = [fixed(prompts.between(size.tokens(16), size.tokens(128))) for _ in range(count)]
    return engine.generate(requests, params, progress=False)


def single_stream(engine: Engine, size: Size, prompts: Prompts) -> list[RequestOutput]:
    outputs = []
    for _ in range(size.count(3)):
        *_, last = engine.stream(prompts.draw(size.tokens(512)), fixed(size.tokens(128)))
        outputs.append(last)
    return outputs


WORKLOADS: dict[str, Callable[[Engine, Size, Prompts], list[RequestOutput]]] = {
    "shared-prefix": shared_prefix,
    "multi-turn": multi_turn,
    "unshared": unshared,
    "single-stream": single_stream,
}


def measure(engine: Engine, workload: str, variant: str, scale: float, seed: int) -> Run:
    """Run a workload on an empty cache."""
    size = Size.of(scale, context_len(engine))
    prompts = Prompts(engine.model_config.vocab_size, seed)
    engine.flush_cache()
    before = engine.stats()
    start = time.perf_counter()
    outputs = WORKLOADS[workload](engine, size, prompts)
    wall_s = time.perf_counter() - start
    return summary(workload, variant, outputs, wall_s, before, engine.stats())


def context_len(engine: Engine) -> int:
    longest = engine.model_config.max_position_embeddings
    return min(longest, engine.config.model.context_len or longest)


def summary(
    workload: str, variant: str, outputs: list[RequestOutput], wall_s: float, before: EngineStats, after: EngineStats
) -> Run:
    input_tokens = sum(output.usage.prompt_tokens for output in outputs)
    output_tokens = sum(output.usage.completion_tokens for output in outputs)
    ttft_p50_ms, ttft_p99_ms = percentiles_ms(first_token_s(output) for output in outputs)
    tpot_p50_ms, tpot_p99_ms = percentiles_ms(per_token_s(output) for output in outputs)
    steps = after.steps - before.steps
    return Run(
        workload=workload,
        variant=variant,
        requests=len(outputs),
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        wall_s=wall_s,
        output_tokens_per_s=output_tokens / wall_s,
        total_tokens_per_s=(input_tokens + output_tokens) / wall_s,
        ttft_p50_ms=ttft_p50_ms,
        ttft_p99_ms=ttft_p99_ms,
        tpot_p50_ms=tpot_p50_ms,
        tpot_p99_ms=tpot_p99_ms,
        cache_hit_rate=sum(output.usage.cached_tokens for output in outputs) / input_tokens,
        steps=steps,
        host_ms_per_step=1e3 * (after.host_s - before.host_s) / steps,
        model_ms_per_step=1e3 * (after.model_s - before.model_s) / steps,
        retractions=after.retractions - before.retractions,
    )


def first_token_s(output: RequestOutput) -> float:
    if output.timings.first_token_s is None:
        raise RuntimeError(f"request {output.request_id} ended without a token: {output.error}")
    return output.timings.first_token_s


def per_token_s(output: RequestOutput) -> float:
    end_s = output.timings.total_s or first_token_s(output)
    return (end_s - first_token_s(output)) / max(1, output.usage.completion_tokens - 1)


def percentiles_ms(seconds: Iterator[float]) -> tuple[float, float]:
    median, p99 = np.percentile(list(seconds), [50, 99]) * 1e3
    return float(median), float(p99)


def machine() -> dict[str, Any]:
    """Say what the figures were measured on."""
    return {
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "graftlm": graftlm.__version__,
    }


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def compare(engines: dict[str, Engine], arguments: argparse.Namespace) -> list[Run]:
    """Run every workload on every engine in turn, and keep each one's fastest run."""
    runs = []
    for workload in arguments.workload or WORKLOADS:
        rounds = [
            [measure(engine, workload, variant, arguments.scale, arguments.seed) for variant, engine in engines.items()]
            for _ in range(arguments.repeats)
        ]
        runs += [min(of_one, key=lambda run: run.wall_s) for of_one in zip(*rounds, strict=True)]
    return runs


def show(runs: Sequence[Run], title: str) -> None:
    table = Table(title=title, caption="ms: median (99th percentile)")
    table.add_column("workload")
    for column in ("wall s", "out tok/s", "total tok/s", "first token ms", "ms/token", "cached"):
        table.add_column(column, justify="right")
    for column in ("steps", "host ms/step", "model ms/step", "retracted"):
        table.add_column(column, justify="right")
    first: dict[str, Run] = {}
    for run in runs:
        base = first.setdefault(run.workload, run)
        name = run.workload if run is base else f"  {run.variant}: {run.wall_s / base.wall_s:.2f}x the time"
        table.add_row(
            name,
            f"{run.wall_s:.2f}",
            f"{run.output_tokens_per_s:,.0f}",
            f"{run.total_tokens_per_s:,.0f}",
            f"{run.ttft_p50_ms:,.0f} ({run.ttft_p99_ms:,.0f})",
            f"{run.tpot_p50_ms:.2f} ({run.tpot_p99_ms:.2f})",
            f"{run.cache_hit_rate:.0%}",
            str(run.steps),
            f"{run.host_ms_per_step:.2f}",
            f"{run.model_ms_per_step:.2f}",
            str(run.retractions),
        )
    Console(width=160).print(table)


def save(path: Path, arguments: argparse.Namespace, runs: Sequence[Run]) -> None:
    result = {
        "machine": machine(),
        "model": arguments.model,
        "config": None if arguments.config is None else str(arguments.config),
        "set": arguments.set,
        "scale": arguments.scale,
        "seed": arguments.seed,
        "repeats": arguments.repeats,
        "runs": [asdict(run) for run in runs],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"saved as {path}")


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--model", default="demo", help="name or folder of the checkpoint")
    made.add_argument("--config", type=Path, help="a YAML file; --model and --set go over it")
    made.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting, as in the YAML file")
    made.add_argument("--workload", action="append", choices=WORKLOADS, help="only this one; may be repeated")
    made.add_argument("--scale", type=float, default=1.0, help="factor on the number of requests")
    made.add_argument("--seed", type=int, default=0, help="of the prompts")
    made.add_argument("--repeats", type=int, default=3, help="runs of each workload; the fastest counts")
    made.add_argument("--compare", action="append", default=[], metavar="KEY=VALUE", help="settings of a second engine")
    made.add_argument("--json", type=Path, help="where to save; default: results/offline-MODEL.json beside this file")
    return made


def main(argv: Sequence[str] | None = None) -> None:
    arguments = parser().parse_args(argv)
    variants = {"base": arguments.set}
    if arguments.compare:
        variants[" ".join(arguments.compare)] = [*arguments.set, *arguments.compare]
    with ExitStack() as stack:
        engines = {
            name: stack.enter_context(Engine(arguments.config, overrides=[f"model.path={arguments.model}", *settings]))
            for name, settings in variants.items()
        }
        for engine in engines.values():
            measure(engine, "unshared", "warm-up", 0.0, arguments.seed + 1)
        runs = compare(engines, arguments)
    name = Path(arguments.model).name
    show(runs, f"{name}, {torch.get_num_threads()} threads on {cpu_name()}")
    save(arguments.json or RESULTS / f"offline-{name}.json", arguments, runs)


if __name__ == "__main__":
    main()
