"""Measures a workload on one engine, or on several engines alternately."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, product

import numpy as np

from graftlm.bench.offline.workloads import WORKLOADS, Prompts, Size
from graftlm.bench.target import BenchError
from graftlm.engine.engine import Engine
from graftlm.records import EngineStats
from graftlm.types import RequestOutput

__all__ = ["Run", "alternate", "fastest", "measure"]


@dataclass(frozen=True, slots=True)
class Run:
    """The figures of one workload on one engine.

    Attributes:
        workload: name of the workload.
        variant: name of the engine: "base", or the settings of `--compare`.
        wall_s: time of the run in seconds.
        ttft_*, tpot_*: TTFT, and mean time per later token; median and 99th percentile over requests.
        cache_hit_rate: share of the prompt tokens that were found in the prefix cache, from 0 to 1.
        host_ms_per_step: time for planning and committing. With overlap, this work runs in parallel with the model.
        model_ms_per_step: time for the forward pass and sampling.
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


def alternate(
    engines: Mapping[str, Engine],
    workloads: Sequence[str],
    *,
    scale: float,
    seed: int,
    rounds: int,
    on_run: Callable[[], None] = lambda: None,
) -> list[list[Run]]:
    """Run workloads on engines alternately, so that changes of the machine's speed affect all engines equally.

    Before the rounds, each engine runs the smallest version of each workload once; this run is not counted. All rounds
    have the same prompts. The engine that runs first changes from round to round.

    Args:
        engines: variant -> engine.
        workloads: names in WORKLOADS.
        scale: factor for the number of requests.
        seed: seed of the prompts.
        rounds: number of runs of each workload on each engine.
        on_run: called after each counted run.

    Returns: a list for each pair of workload and round, with one run per engine, in the engines' order.

    Raises:
        BenchError, RequestError: see `measure`.
    """
    for (variant, engine), workload in product(engines.items(), workloads):
        measure(engine, workload, variant, 0.0, seed + 1)
    names = list(engines)
    found = []
    for workload, i in product(workloads, range(rounds)):
        runs: dict[str, Run] = {}
        for name in names[i % len(names) :] + names[: i % len(names)]:
            runs[name] = measure(engines[name], workload, name, scale, seed)
            on_run()
        found.append([runs[name] for name in names])
    return found


def fastest(rounds: Iterable[Sequence[Run]]) -> list[Run]:
    """Return each variant's fastest run of each workload.

    Args:
        rounds: the result of `alternate`.
    """
    best: dict[tuple[str, str], Run] = {}
    for run in chain.from_iterable(rounds):
        key = (run.workload, run.variant)
        best[key] = min(best.get(key, run), run, key=lambda run: run.wall_s)
    return list(best.values())


def measure(engine: Engine, workload: str, variant: str, scale: float, seed: int) -> Run:
    """Run a workload, starting with an empty prefix cache, and return its figures.

    Args:
        workload: a name in WORKLOADS.
        variant: name of the engine in the figures.
        scale: factor for the number of requests.
        seed: seed of the prompts.

    Raises:
        BenchError: a request ended without a token.
        RequestError: the engine refuses a request, for instance because it has no grammar backend.
    """
    size = Size.of(scale, _context_len(engine))
    prompts = Prompts(engine.model_config.vocab_size, seed)
    engine.flush_cache()
    before = engine.stats()
    start = time.perf_counter()
    outputs = WORKLOADS[workload].run(engine, size, prompts)
    wall_s = time.perf_counter() - start
    return _summary(workload, variant, outputs, wall_s, before, engine.stats())


def _context_len(engine: Engine) -> int:
    longest = engine.model_config.max_position_embeddings
    return min(longest, engine.config.model.context_len or longest)


def _summary(
    workload: str, variant: str, outputs: list[RequestOutput], wall_s: float, before: EngineStats, after: EngineStats
) -> Run:
    input_tokens = sum(output.usage.prompt_tokens for output in outputs)
    output_tokens = sum(output.usage.completion_tokens for output in outputs)
    ttft_p50_ms, ttft_p99_ms = _percentiles_ms(_first_token_s(output) for output in outputs)
    tpot_p50_ms, tpot_p99_ms = _percentiles_ms(_per_token_s(output) for output in outputs)
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


def _first_token_s(output: RequestOutput) -> float:
    if output.timings.first_token_s is None:
        raise BenchError(f"request {output.request_id} ended without a token: {output.error or output.finish_reason}")
    return output.timings.first_token_s


def _per_token_s(output: RequestOutput) -> float:
    end_s = output.timings.total_s or _first_token_s(output)
    return (end_s - _first_token_s(output)) / max(1, output.usage.completion_tokens - 1)


def _percentiles_ms(seconds: Iterator[float]) -> tuple[float, float]:
    median, p99 = np.percentile(list(seconds), [50, 99]) * 1e3
    return float(median), float(p99)
