"""Times the sampling of tokens on a CPU; the compiled kernel and torch's operations alternate.

    python benchmarks/sampling.py [--rounds N] [--json FILE]

Logits are bfloat16, normally distributed with a standard deviation of 3. Figures are medians in milliseconds per step.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

import graftlm  # before torch, because graftlm loads the OpenMP library
from graftlm.contracts import LogitsProcessor
from graftlm.execution.native_sampling import NativeSampling
from graftlm.execution.sampler import Sampler
from graftlm.layers.kernel_build import user_cache_dir
from graftlm.plan import RowSetup

import torch  # isort: skip

RESULTS = Path(__file__).parent / "results" / "sampling.json"
VOCAB_SIZES = (32_000, 128_256)
BATCHES = (1, 8, 64)
PARAMS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 1.0},
    "top_p": {"temperature": 0.8, "top_p": 0.9},
    "top_k, top_p": {"temperature": 0.8, "top_k": 50, "top_p": 0.9},
    "min_p": {"temperature": 0.8, "min_p": 0.1},
}


@dataclass(frozen=True, slots=True)
class Cell:
    """The times for one setting, in milliseconds per step."""

    vocab_size: int
    batch: int
    params: str
    native_ms: float
    torch_ms: float


def no_processor(name: str, options: Any, context: Any) -> LogitsProcessor:
    """Raise NotImplementedError, because no request uses a logits processor."""
    raise NotImplementedError(name)


def sampler_for(vocab_size: int, batch: int, params: dict[str, Any], native: NativeSampling | None) -> Sampler:
    """Return a sampler with `batch` requests in its rows."""
    sampler = Sampler(batch, vocab_size, torch.device("cpu"), no_processor, native_sampling=native)
    none = np.empty(0, dtype=np.int32)
    for row in range(batch):
        sampler.set_row(RowSetup(row, str(row), graftlm.SamplingParams(**params), row, none, none, ()))
    return sampler


@torch.inference_mode()
def cells(native: NativeSampling, rounds: int) -> Iterator[Cell]:
    """Time every setting."""
    for vocab_size in VOCAB_SIZES:
        for batch in BATCHES:
            logits = (torch.randn(batch, vocab_size, generator=torch.Generator().manual_seed(0)) * 3).bfloat16()
            for name, params in PARAMS.items():
                samplers = [sampler_for(vocab_size, batch, params, kernels) for kernels in (native, None)]
                times: list[list[float]] = [[], []]
                for i in range(rounds + 1):
                    for sampler, taken in zip(samplers, times, strict=True):
                        start = time.perf_counter()
                        sampler.sample(logits, np.arange(batch, dtype=np.int32), np.full(batch, i))
                        taken.append(time.perf_counter() - start)
                native_ms, torch_ms = (1e3 * statistics.median(taken[1:]) for taken in times)
                yield Cell(vocab_size, batch, name, native_ms, torch_ms)


def main() -> None:
    """Print a table and save it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--json", type=Path, default=RESULTS)
    args = parser.parse_args()
    native = NativeSampling.load("g++", user_cache_dir(os.environ))
    if native is None:
        raise SystemExit("the kernel cannot be compiled here")
    found = list(cells(native, args.rounds))
    table = Table("vocabulary", "requests", "sampling", "kernel, ms", "torch, ms", "times as fast")
    for cell in found:
        ratio = f"{cell.torch_ms / cell.native_ms:.1f}"
        row = (f"{cell.vocab_size:,}", str(cell.batch), cell.params, f"{cell.native_ms:.2f}", f"{cell.torch_ms:.2f}")
        table.add_row(*row, ratio)
    Console().print(table)
    args.json.write_text(json.dumps([asdict(cell) for cell in found], indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
