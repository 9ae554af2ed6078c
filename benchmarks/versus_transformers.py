"""Compares the speed of graftlm, of Transformers' `generate` and of vLLM: same random model, prompts and lengths.

    python benchmarks/versus_transformers.py --rounds 5 --json benchmarks/results/versus_transformers.json
    python benchmarks/versus_transformers.py --size 360m --dtype bfloat16 --vllm PYTHON_OF_A_VLLM_ENVIRONMENT

The engines run alternately, with greedy sampling, on a CPU, with the same number of threads. Transformers gets the
requests of a workload as one padded batch, which is its fastest way without a server; this batch runs until its longest
answer ends. The weights are random, because only speed is compared. In float32, the engines must generate the same
tokens for requests without padding.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from graftlm import Engine, SamplingParams  # before torch, because graftlm loads the OpenMP library
from graftlm.testing.tiny_models import write_tiny_checkpoint

import torch  # isort: skip
from transformers import LlamaForCausalLM  # isort: skip

VOCAB_SIZE = 8000
SIZES: dict[str, dict[str, Any]] = {
    "30m": {"hidden_size": 512, "intermediate_size": 1408, "num_layers": 8, "num_heads": 8, "num_kv_heads": 4},
    "360m": {"hidden_size": 960, "intermediate_size": 2560, "num_layers": 32, "num_heads": 15, "num_kv_heads": 5},
}


@dataclass(frozen=True, slots=True)
class Workload:
    """A list of requests that are sent at the same time.

    Attributes:
        prompts: token ids of each prompt.
        output_lens: number of tokens to generate for each prompt.
    """

    name: str
    prompts: tuple[tuple[int, ...], ...]
    output_lens: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        """Total number of tokens to generate."""
        return sum(self.output_lens)


@dataclass(frozen=True, slots=True)
class Row:
    """The figures of one workload: medians over rounds.

    Attributes:
        tokens_per_s: output tokens per second of each engine.
        ratios: other engine -> (graftlm's median speed divided by the engine's median speed, and the smallest and
            the largest ratio of a round).
    """

    workload: str
    tokens_per_s: dict[str, float]
    ratios: dict[str, tuple[float, float, float]]

    def saved(self) -> dict[str, Any]:
        """Return the row as JSON values; keys of the ratio to Transformers have no prefix."""
        row: dict[str, Any] = {"workload": self.workload}
        row |= {f"{engine}_tokens_per_s": rate for engine, rate in self.tokens_per_s.items()}
        for engine, (ratio, low, high) in self.ratios.items():
            prefix = "" if engine == "transformers" else f"{engine}_"
            row |= {f"{prefix}ratio": ratio, f"{prefix}ratio_min": low, f"{prefix}ratio_max": high}
        return row


def make_workloads(seed: int, scale: float) -> list[Workload]:
    """Return the workloads with random prompts; `scale` is a factor for the lengths."""
    draw = np.random.default_rng(seed)

    def tokens(length: int) -> tuple[int, ...]:
        return tuple(draw.integers(300, VOCAB_SIZE, size=max(2, int(length * scale))).tolist())

    def lens(low: int, high: int, count: int) -> tuple[int, ...]:
        return tuple(max(2, int(n * scale)) for n in draw.integers(low, high + 1, size=count))

    shared = tokens(256)
    return [
        Workload("one request", (tokens(128),), lens(32, 32, 1)),
        Workload("16 of one length", tuple(tokens(64) for _ in range(16)), lens(16, 16, 16)),
        Workload("16 of mixed lengths", tuple(tokens(n) for n in draw.integers(16, 193, size=16)), lens(2, 48, 16)),
        Workload("16 with a common prefix", tuple(shared + tokens(16) for _ in range(16)), lens(8, 8, 16)),
    ]


class TransformersSide:
    """Transformers: runs a workload as one padded batch with `generate`."""

    def __init__(self, folder: Path, dtype: str) -> None:
        self._model = LlamaForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()

    @torch.inference_mode()
    def run(self, workload: Workload) -> list[list[int]]:
        """Return each request's tokens."""
        width = max(map(len, workload.prompts))
        ids = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in workload.prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in workload.prompts])
        longest = max(workload.output_lens)
        out = self._model.generate(
            ids, attention_mask=mask, do_sample=False, min_new_tokens=longest, max_new_tokens=longest, pad_token_id=0
        )
        return [row[width : width + n].tolist() for row, n in zip(out, workload.output_lens, strict=True)]


class GraftlmSide:
    """graftlm: runs all requests of a workload in one call, with an empty prefix cache."""

    def __init__(self, folder: Path, dtype: str) -> None:
        self.engine = Engine(model={"path": str(folder), "dtype": dtype}, memory={"kv_tokens": 32768})

    def run(self, workload: Workload) -> list[list[int]]:
        """Return each request's tokens."""
        self.engine.flush_cache()
        params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in workload.output_lens]
        return [list(out.token_ids) for out in self.engine.generate([list(p) for p in workload.prompts], params)]


class VllmSide:
    """vLLM in another process: runs all requests of a workload in one call, with an empty prefix cache."""

    def __init__(self, python: Path, folder: Path, dtype: str) -> None:
        worker = Path(__file__).with_name("vllm_worker.py")
        command = [python, worker, folder, dtype, str(torch.get_num_threads())]
        environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        self._process = subprocess.Popen(
            [str(part) for part in command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ
        )
        self.version = str(self._answer()["version"])

    def run(self, workload: Workload) -> list[list[int]]:
        """Return each request's tokens."""
        assert self._process.stdin is not None
        request = {"prompts": workload.prompts, "output_lens": workload.output_lens}
        print(json.dumps(request), file=self._process.stdin, flush=True)
        tokens: list[list[int]] = self._answer()["tokens"]
        return tokens

    def close(self) -> None:
        """End the worker process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("answer: "):
                answer: dict[str, Any] = json.loads(line.removeprefix("answer: "))
                return answer
        raise SystemExit("vLLM's process has ended; its messages are above")


Run = Callable[[Workload], list[list[int]]]


def compare(runs: dict[str, Run], workloads: Sequence[Workload], rounds: int, *, exact: bool) -> list[Row]:
    """Run the engines alternately; the first run of each is a warm-up.

    Args:
        runs: engine -> function that runs a workload; must contain "graftlm".
        exact: whether the tokens of requests without padding must be equal.
    """
    rows = []
    for workload in workloads:
        tokens = {engine: run(workload) for engine, run in runs.items()}
        same = [a == b for a, b in zip(tokens["transformers"], tokens["graftlm"], strict=True)]
        if exact and len(set(map(len, workload.prompts))) == 1 and not all(same):
            raise SystemExit(f"{workload.name}: tokens of {same.count(False)} of {len(same)} requests differ")
        seconds: dict[str, list[float]] = {engine: [] for engine in runs}
        order = list(runs)
        for _ in range(rounds):
            for engine in order:
                seconds[engine].append(timed(runs[engine], workload))
            order = order[1:] + order[:1]
        rates = {engine: workload.num_tokens / statistics.median(times) for engine, times in seconds.items()}
        ratios = {}
        for engine in runs:
            if engine != "graftlm":
                found = [a / b for a, b in zip(seconds[engine], seconds["graftlm"], strict=True)]
                ratios[engine] = rates["graftlm"] / rates[engine], min(found), max(found)
        rows.append(Row(workload.name, rates, ratios))
        speeds = "  ".join(f"{engine} {rate:8.1f}" for engine, rate in rates.items())
        shown = "  ".join(f"{name} {r[0]:.2f}x ({r[1]:.2f} to {r[2]:.2f})" for name, r in ratios.items())
        print(f"{workload.name:26} {speeds}   {shown}", flush=True)
    return rows


def timed(run: Run, workload: Workload) -> float:
    """Return the duration of a run in seconds."""
    start_s = time.perf_counter()
    run(workload)
    return time.perf_counter() - start_s


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the comparison, print a table, and save it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--scale", type=float, default=1.0, help="factor of all lengths")
    parser.add_argument("--size", choices=SIZES, default="30m", help="parameters of the model")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--vllm", type=Path, metavar="PYTHON", help="Python of an environment with vLLM's CPU build")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    shape = SIZES[options.size]
    with tempfile.TemporaryDirectory() as name:
        folder = write_tiny_checkpoint(
            Path(name),
            **shape,
            head_dim=64,
            vocab_size=VOCAB_SIZE,
            max_position_embeddings=2048,
            initializer_range=0.05,
            tokenizer=True,
        )
        ours = GraftlmSide(folder, options.dtype)
        runs: dict[str, Run] = {"graftlm": ours.run, "transformers": TransformersSide(folder, options.dtype).run}
        vllm = None if options.vllm is None else VllmSide(options.vllm, folder, options.dtype)
        if vllm is not None:
            runs["vllm"] = vllm.run
        with ours.engine:
            workloads = make_workloads(0, options.scale)
            rows = compare(runs, workloads, options.rounds, exact=options.dtype == "float32")
        if vllm is not None:
            vllm.close()
    if options.json:
        machine = {"machine": platform.machine(), "threads": torch.get_num_threads(), "torch": torch.__version__}
        saved = {"machine": machine, "layers": shape["num_layers"], "dtype": options.dtype, "rounds": options.rounds}
        saved |= {} if vllm is None else {"vllm": vllm.version}
        options.json.write_text(json.dumps(saved | {"rows": [row.saved() for row in rows]}, indent=1) + "\n")


if __name__ == "__main__":
    main()
