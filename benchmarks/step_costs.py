"""Measures the duration of steps, and fits the cost model of `graftlm route-sim`.

python benchmarks/step_costs.py --config engine.yaml
graftlm route-sim trace.jsonl --cost step_ms=...,prefill_us=...,decode_us=...     # the last line that it prints
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from graftlm import Engine, EngineConfig, SamplingParams, hookimpl
from graftlm.records import StepRecord

#: Numbers of requests that start together, and lengths of their prompts in tokens.
LOADS = [(1, 32), (2, 256), (4, 64), (8, 128), (16, 32), (32, 16), (1, 400), (16, 200)]

OUTPUT_TOKENS = 24


class Recorder:
    """A plugin that collects the records of all steps."""

    def __init__(self) -> None:
        self.records: list[StepRecord] = []

    @hookimpl
    def step_finished(self, record: StepRecord) -> None:
        """Collect a record."""
        self.records.append(record)


def measure(config: EngineConfig, repeats: int) -> list[StepRecord]:
    """Run all loads several times, without cached prefixes, and return the records of the steps."""
    recorder = Recorder()
    draw = np.random.default_rng(0)
    params = SamplingParams(temperature=0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
    with Engine(config, plugins=[recorder]) as engine:
        for repeat in range(repeats + 1):
            if repeat == 1:
                recorder.records.clear()  # the first repeat is for warming up
            for num_requests, num_tokens in LOADS:
                prompts = draw.integers(3, 1000, (num_requests, num_tokens)).tolist()
                engine.generate(prompts, params)
    return recorder.records


def fit(records: Sequence[StepRecord]) -> tuple[float, float, float]:
    """Return the cost in seconds of a step, of a prompt token and of a decode row: the median of weighted fits.

    Each step has the weight 1 / duration, so that relative errors count. Outliers are dropped once.
    """
    counts = np.array([(1, record.num_prefill_tokens, record.num_decodes) for record in records], dtype=float)
    seconds = np.array([record.model_s for record in records])
    kept = np.ones(len(seconds), dtype=bool)
    for _ in range(2):
        weights = 1 / seconds[kept]
        found, *_ = np.linalg.lstsq(counts[kept] * weights[:, None], seconds[kept] * weights, rcond=None)
        errors = np.abs(counts @ found / seconds - 1)
        kept = errors <= np.percentile(errors, 90)
    step_s, token_s, row_s = (max(0.0, float(value)) for value in found)
    return step_s, token_s, row_s


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the measurement that the command line selects."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--config", type=Path, help="the engine; without it, the bundled model")
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args(arguments)
    config = EngineConfig.load({"model": "demo"} if given.config is None else given.config)
    records = measure(config, given.repeats)
    step_s, token_s, row_s = fit(records)
    predicted = [step_s + token_s * one.num_prefill_tokens + row_s * one.num_decodes for one in records]
    errors = np.abs(np.array(predicted) / [one.model_s for one in records] - 1)
    print(f"{len(records)} steps; the median error of the fit is {np.median(errors):.0%}")
    print(f"step_ms={step_s * 1e3:.3g},prefill_us={token_s * 1e6:.3g},decode_us={row_s * 1e6:.3g}")


if __name__ == "__main__":
    main()
