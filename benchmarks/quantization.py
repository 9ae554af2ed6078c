"""Measures speed and accuracy of quantized weights: matrix products, a whole model, the bundled model's answers.

    python benchmarks/quantization.py [--only products model accuracy] [--rounds N] [--out FILE]

Products: the four matrices of a layer of a 360M Llama (hidden size 1,024, intermediate size 3,584) times 1 to 512 rows
in bfloat16. There are six layers, so that the weights are read from memory and not from CPU caches. Packed bfloat16,
int8 and int4 alternate.

Model: engines with a random 360M model, one for each variant, decode 1 and 32 requests and prefill a prompt of 512
tokens; the engines alternate. Figures are medians; a ratio compares medians of one run.

Accuracy: the bundled model answers held-out questions; the answers are compared with those of its float32 weights.
"""

import argparse
import itertools
import json
import math
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from graftlm import Engine, SamplingParams, hookimpl
from graftlm.contracts import Quantization, QuantizationContext
from graftlm.demo.corpus import as_messages, held_out_questions
from graftlm.layers.kernel_build import user_cache_dir
from graftlm.layers.ops import choose_ops
from graftlm.layers.packing import linear
from graftlm.records import StepRecord
from graftlm.registry import Registry
from graftlm.testing.tiny_models import write_tiny_checkpoint
from graftlm.tokenization import Tokenizer

RESULTS = Path(__file__).parent / "results" / "quantization.json"
SHAPES = ((1536, 1024), (1024, 1024), (7168, 1024), (1024, 3584))  # [out, in] of qkv, out, gate and up, down
LAYERS = 6
ROWS = (1, 2, 4, 8, 16, 32, 64, 256, 512)
VARIANTS: Mapping[str, Any] = {"bf16": None, "int8": "int8", "int4": "int4"}
PROMPT_TOKENS, NEW_TOKENS, LONG_PROMPT_TOKENS = 16, 48, 512
QUALITY: Mapping[str, Mapping[str, Any]] = {
    "float32": {"model": {"dtype": "float32"}},
    "bfloat16": {"model": {"dtype": "bfloat16"}},
    "int8, a scale per output": {"model": {"quantization": "int8"}},
    "int8, groups of 64": {"model": {"quantization": {"name": "int8", "options": {"group_size": 64}}}},
    "int4, groups of 32": {"model": {"quantization": {"name": "int4", "options": {"group_size": 32}}}},
    "int4, groups of 64": {"model": {"quantization": "int4"}},
}


def in_turns(runs: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, float]:
    """Call the functions alternately; return name -> median of the results, without the first round."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for round_idx in range(rounds + 1):
        for name, run in runs.items():
            value = run()
            if round_idx:
                times[name].append(value)
    return {name: statistics.median(values) for name, values in times.items()}


def elapsed(run: Callable[[], object]) -> float:
    """Return the time of a call in seconds."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def quantization_of(name: str) -> Quantization:
    """Create a quantization with its default options."""
    registry = Registry.load()
    context = QuantizationContext(torch.device("cpu"), torch.bfloat16)
    quantization: Quantization = registry.create("quantization", registry.provider("quantization", name), {}, context)
    return quantization


def measure_products(rounds: int) -> list[dict[str, float]]:
    """Time the product with all matrices in sequence, for each number of rows."""
    weights = [torch.randn(shape, dtype=torch.bfloat16) * 0.02 for _ in range(LAYERS) for shape in SHAPES]
    layers: dict[str, list[Callable[[Tensor], Tensor]]] = {
        name: [quantization_of(name).convert(weight, None) for weight in weights] for name in ("int8", "int4")
    }
    ops = choose_ops(torch.device("cpu"), torch.bfloat16, user_cache_dir(os.environ))
    packed = [(weight, ops.pack(weight)) for weight in weights]
    layers["bf16"] = [lambda x, pair=pair: linear(x, *pair) for pair in packed]  # type: ignore[misc]
    return [_time_rows(num_rows, layers, rounds) for num_rows in ROWS]


def _time_rows(
    num_rows: int, layers: Mapping[str, Sequence[Callable[[Tensor], Tensor]]], rounds: int
) -> dict[str, float]:
    inputs = [torch.randn(num_rows, size, dtype=torch.bfloat16) for _ in range(LAYERS) for _, size in SHAPES]

    def run(name: str) -> Callable[[], float]:
        return lambda: elapsed(lambda: [layer(x) for layer, x in zip(layers[name], inputs, strict=True)])

    medians = in_turns({name: run(name) for name in VARIANTS}, rounds)
    per_layer = {f"{name}_us": 1e6 * seconds / LAYERS for name, seconds in medians.items()}
    ratios = {f"{name}_speedup": medians["bf16"] / medians[name] for name in ("int8", "int4")}
    return {"rows": num_rows} | per_layer | ratios


class StepClock:
    """A plugin that records the time at which each step ends."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    @hookimpl
    def step_finished(self, record: StepRecord) -> None:
        """Record a step."""
        self.ends.append(time.perf_counter())


class Subject:
    """An engine with one variant of the random model, and the timed workloads."""

    def __init__(self, stack: ExitStack, checkpoint: Path, quantization: Any) -> None:
        self._clock = StepClock()
        config = {
            "model": {"path": str(checkpoint), "quantization": quantization},
            "cache": {"name": "chunk", "page_size": 16},
            "memory": {"kv_tokens": 8192},
        }
        self._engine = stack.enter_context(Engine(config, plugins=[self._clock]))
        self._random = random.Random(1)

    def decode(self, num_requests: int) -> float:
        """Return the median time in seconds of a step in which every request decodes."""
        self._clock.ends.clear()
        self._generate(num_requests, PROMPT_TOKENS, NEW_TOKENS)
        ends = self._clock.ends[-NEW_TOKENS // 2 :]  # without the steps of the prompts
        return statistics.median(after - before for before, after in itertools.pairwise(ends))

    def prefill(self) -> float:
        """Return the time from a prompt to its first token, in seconds."""
        return elapsed(lambda: self._generate(1, LONG_PROMPT_TOKENS, 1))

    def _generate(self, num_requests: int, prompt_tokens: int, new_tokens: int) -> None:
        prompts = [[self._random.randrange(300, 32_000) for _ in range(prompt_tokens)] for _ in range(num_requests)]
        self._engine.generate(prompts, SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True))


def measure_model(rounds: int) -> dict[str, dict[str, float]]:
    """Time whole steps of a random model of 360M parameters."""
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        checkpoint = write_tiny_checkpoint(
            Path(directory) / "model", hidden_size=1024, intermediate_size=3584, num_layers=24, num_heads=16,
            num_kv_heads=4, head_dim=64, vocab_size=32_000, max_position_embeddings=2048, tie_word_embeddings=True,
            dtype=torch.bfloat16, initializer_range=0.02, tokenizer=True,
        )  # fmt: skip
        subjects = {name: Subject(stack, checkpoint, quantization) for name, quantization in VARIANTS.items()}
        decode_1 = in_turns({name: lambda s=s: s.decode(1) for name, s in subjects.items()}, rounds)  # type: ignore[misc]
        decode_32 = in_turns({name: lambda s=s: s.decode(32) for name, s in subjects.items()}, rounds)  # type: ignore[misc]
        prefill = in_turns({name: s.prefill for name, s in subjects.items()}, rounds)
    return {
        "decode, 1 request, tokens/s": {name: 1 / seconds for name, seconds in decode_1.items()},
        "decode, 32 requests, tokens/s": {name: 32 / seconds for name, seconds in decode_32.items()},
        "prefill of 512, tokens/s": {name: LONG_PROMPT_TOKENS / seconds for name, seconds in prefill.items()},
    }


def measure_accuracy(
    variants: Mapping[str, Mapping[str, Any]] = QUALITY, per_form: int = 12
) -> dict[str, dict[str, float]]:
    """Compare answers to held-out questions and log-probabilities of each variant with those of the first one."""
    results, reference = {}, None
    for name, settings in variants.items():
        with Engine(settings) as engine:
            answers = _Answers.of(engine, per_form)
        reference = reference or answers
        results[name] = answers.compared(reference)
    return results


class _Answers:
    """An engine's answers to questions, and its log-probabilities for the right answers."""

    def __init__(self, replies: list[str], right: list[str], logprobs: list[float], best: list[int]) -> None:
        self._replies, self._right, self._logprobs, self._best = replies, right, logprobs, best

    @classmethod
    def of(cls, engine: Engine, per_form: int) -> "_Answers":
        questions = held_out_questions(0, per_form)
        tokenizer = Tokenizer.load(_demo_folder())
        asked = [tokenizer.encode_chat(as_messages(question.turns, None)[:-1]) for question in questions]
        outputs = engine.generate([list(prompt) for prompt in asked], SamplingParams(temperature=0, max_tokens=64))
        read = [
            [*prompt, *tokenizer.encode_inside(question.answer)]
            for prompt, question in zip(asked, questions, strict=True)
        ]
        seen = engine.generate(read, SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1))
        entries = [entry for output in seen for entry in output.prompt_logprobs or () if entry is not None]
        answers = [
            entry
            for prompt, output in zip(asked, seen, strict=True)
            for entry in (output.prompt_logprobs or ())[len(prompt) :]
            if entry is not None
        ]
        return cls(
            [output.text for output in outputs],
            [question.answer for question in questions],
            [entry.logprob for entry in answers],
            [entry.top[0][0] for entry in entries],
        )

    def compared(self, reference: "_Answers") -> dict[str, float]:
        """Return name -> figure; agreement is the share of the reference's answers or tokens that are equal."""
        count = len(self._replies)
        same = sum(a == b for a, b in zip(self._replies, reference._replies, strict=True))
        same_tokens = sum(a == b for a, b in zip(self._best, reference._best, strict=True))
        return {
            "perplexity of the right answers": math.exp(-statistics.fmean(self._logprobs)),
            "same most likely token": same_tokens / len(self._best),
            "same greedy answer": same / count,
            "right answers": sum(a == b for a, b in zip(self._replies, self._right, strict=True)) / count,
        }


def _demo_folder() -> Path:
    from graftlm.checkpoint import resolve_checkpoint

    return resolve_checkpoint("demo")


def show(console: Console, title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Print a table; all rows have the same keys."""
    table = Table(*rows[0], title=title)
    for row in rows:
        table.add_row(*(f"{value:,.4g}" if isinstance(value, float) else str(value) for value in row.values()))
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=("products", "model", "accuracy"))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    wanted = args.only or ("products", "model", "accuracy")
    console, results = Console(width=120), json.loads(args.out.read_text()) if args.out.exists() else {}
    here = {"cpu": torch.cpu.get_capabilities().get("cpu_name"), "threads": torch.get_num_threads()}
    if any(results.get(name) != value for name, value in here.items()):
        results = here  # figures of another machine are dropped
    if "products" in wanted:
        results["products"] = measure_products(args.rounds)
        show(console, "Products, microseconds a layer", results["products"])
    if "model" in wanted:
        results["model"] = measure_model(args.rounds)
        show(console, "A random model of 360M", [{"": name} | row for name, row in results["model"].items()])
    if "accuracy" in wanted:
        results["accuracy"] = measure_accuracy()
        show(console, "The bundled model", [{"": name} | row for name, row in results["accuracy"].items()])
    args.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
