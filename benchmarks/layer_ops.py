"""Measures the time that fused norms, rotation and gated activation save, per call and per decode step.

    python benchmarks/layer_ops.py [--only calls steps] [--rounds N] [--threads N] [--out FILE]

Calls: rows with the shape of a 360M Llama (hidden size 1,024, intermediate size 2,560, 16 query heads and 8 key/value
heads of 64), with PyTorch's operations and with the compiled kernels.

Steps: two engines with a random bfloat16 model of that shape, one with `model.native_ops` and one without, decode 1 and
16 requests; they alternate. Figures are medians in microseconds; a ratio compares medians of one run.
"""

import argparse
import itertools
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from graftlm import Engine, SamplingParams, hookimpl
from graftlm.layers.kernel_build import user_cache_dir
from graftlm.layers.ops import LayerOps, NativeOps, TorchOps
from graftlm.records import StepRecord
from graftlm.testing.tiny_models import write_tiny_checkpoint

RESULTS = Path(__file__).parent / "results" / "layer_ops.json"
HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM = 1024, 2560, 16, 8, 64
ROWS = (1, 16, 512)
DTYPES = (torch.bfloat16, torch.float32)
CALLS_PER_TURN = {1: 200, 16: 60, 512: 4}
PROMPT_TOKENS, NEW_TOKENS = 16, 32


def operations(num_rows: int, dtype: torch.dtype) -> Iterator[tuple[str, Callable[[LayerOps], object]]]:
    """Yield (name, operation) for the operations that a layer calls."""
    x, residual = (torch.randn(num_rows, HIDDEN).to(dtype) for _ in range(2))
    weight, wide_weight = torch.randn(HIDDEN).to(dtype), torch.randn(HIDDEN)
    qkv = torch.randn(num_rows, HEADS + 2 * KV_HEADS, HEAD_DIM).to(dtype)
    qk, head_weight = qkv[:, : HEADS + KV_HEADS], torch.randn(HEADS + KV_HEADS, HEAD_DIM).to(dtype)
    cos, sin = (torch.randn(num_rows, 1, HEAD_DIM).to(dtype) for _ in range(2))
    gate_up = torch.randn(num_rows, 2 * INTERMEDIATE).to(dtype)
    yield "add_rms_norm", lambda ops: ops.add_rms_norm(x, residual, weight, 1e-5)
    yield "add_rms_norm, Gemma", lambda ops: ops.add_rms_norm(x, residual, wide_weight, 1e-5)
    yield "head_norm", lambda ops: ops.head_norm(qk, head_weight, 1e-5)
    yield "rotate", lambda ops: ops.rotate(qk, cos, sin)
    yield "act_and_mul, SiLU", lambda ops: ops.act_and_mul(gate_up, "silu")
    yield "act_and_mul, GELU", lambda ops: ops.act_and_mul(gate_up, "gelu_pytorch_tanh")


def in_turns(runs: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, float]:
    """Call the functions alternately; return name -> median of the results, without the first round."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for round_idx in range(rounds + 1):
        for name, run in runs.items():
            value = run()
            if round_idx:
                times[name].append(value)
    return {name: statistics.median(values) for name, values in times.items()}


def call_time(call: Callable[[], object], count: int) -> float:
    """Return the mean time of a call in microseconds, over `count` calls."""
    start = time.perf_counter()
    for _ in range(count):
        call()
    return 1e6 * (time.perf_counter() - start) / count


def measure_calls(rounds: int) -> list[dict[str, Any]]:
    """Time every operation for each dtype and each number of rows."""
    variants: dict[str, LayerOps] = {
        "torch_us": TorchOps(),
        "native_us": NativeOps.load("g++", user_cache_dir(os.environ)),
    }
    rows = []
    for dtype, num_rows in itertools.product(DTYPES, ROWS):
        for name, call in operations(num_rows, dtype):
            count = CALLS_PER_TURN[num_rows]
            runs = {
                variant: lambda ops=ops, call=call, count=count: call_time(lambda: call(ops), count)  # type: ignore[misc]
                for variant, ops in variants.items()
            }
            medians = in_turns(runs, rounds)
            kind = {"dtype": str(dtype).removeprefix("torch."), "rows": num_rows, "operation": name}
            rows.append(kind | medians | {"speedup": medians["torch_us"] / medians["native_us"]})
    return rows


class Subject:
    """An engine with the random model, with or without fused operations."""

    def __init__(self, stack: ExitStack, checkpoint: Path, native_ops: bool) -> None:
        self._ends: list[float] = []
        config = {
            "model": {"path": str(checkpoint), "native_ops": native_ops},
            "cache": {"name": "chunk", "page_size": 16},
            "memory": {"kv_tokens": 4096},
        }
        self._engine = stack.enter_context(Engine(config, plugins=[self]))
        self._random = random.Random(1)

    @hookimpl
    def step_finished(self, record: StepRecord) -> None:
        """Record the time at which a step ends."""
        self._ends.append(time.perf_counter())

    def decode(self, num_requests: int) -> float:
        """Return the median time in microseconds of a step in which every request decodes."""
        self._ends.clear()
        prompts = [[self._random.randrange(300, 32_000) for _ in range(PROMPT_TOKENS)] for _ in range(num_requests)]
        self._engine.generate(prompts, SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True))
        ends = self._ends[-NEW_TOKENS // 2 :]  # without the steps of the prompts
        return 1e6 * statistics.median(after - before for before, after in itertools.pairwise(ends))


def measure_steps(rounds: int) -> list[dict[str, Any]]:
    """Time decode steps of a random model of 360M parameters."""
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        checkpoint = write_tiny_checkpoint(
            Path(directory) / "model", hidden_size=HIDDEN, intermediate_size=INTERMEDIATE, num_layers=24,
            num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, vocab_size=32_000, max_position_embeddings=2048,
            tie_word_embeddings=True, dtype=torch.bfloat16, initializer_range=0.02, tokenizer=True,
        )  # fmt: skip
        subjects = {"torch_us": Subject(stack, checkpoint, False), "native_us": Subject(stack, checkpoint, True)}
        rows = []
        for num_requests in (1, 16):
            runs = {
                name: lambda subject=subject, n=num_requests: subject.decode(n)  # type: ignore[misc]
                for name, subject in subjects.items()
            }
            medians = in_turns(runs, rounds)
            rows.append({"requests": num_requests} | medians | {"speedup": medians["torch_us"] / medians["native_us"]})
    return rows


def show(console: Console, title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Print a table; all rows have the same keys."""
    table = Table(*rows[0], title=title)
    for row in rows:
        table.add_row(*(f"{value:,.2f}" if isinstance(value, float) else str(value) for value in row.values()))
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=("calls", "steps"))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    wanted = args.only or ("calls", "steps")
    console, results = Console(width=120), json.loads(args.out.read_text()) if args.out.exists() else {}
    results["cpu"] = torch.cpu.get_capabilities().get("cpu_name")
    if "calls" in wanted:
        results["calls"], results["calls_threads"] = measure_calls(args.rounds), args.threads
        show(console, "One call", results["calls"])
    if "steps" in wanted:
        results["steps"], results["steps_threads"] = measure_steps(args.rounds), args.threads
        show(console, "One decode step", results["steps"])
    args.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
