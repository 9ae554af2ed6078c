"""Measures the time that a grammar adds to a step, and the delay of other requests while a large schema is compiled.

    python benchmarks/grammar_overhead.py [--steps N] [--rounds N] [--overlap on|off|both] [--backend NAME] [--out FILE]

A random model of 100M parameters decodes 16 requests. Its tokenizer has 32,000 tokens and is trained on the Python
files of the standard library. A short run without a grammar and a short run with a grammar form a pair; the order
within pairs alternates. The overhead of a pair is the difference between its runs' median step times, without
compilation. The result is the median over the pairs; its standard error is estimated from the quartiles. Jump-forward
is off, so that every step samples 16 tokens. A second measurement decodes 8 requests, with and without other requests
whose schemas of 600 fields are compiled, and compares the longest times between tokens.
"""

import argparse
import asyncio
import itertools
import json
import statistics
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import tokenizers
import transformers
from tokenizers import decoders, models, pre_tokenizers, trainers

from graftlm import Engine, FinishReason, SamplingParams, hookimpl
from graftlm.records import StepRecord
from graftlm.registry import Registry
from graftlm.testing.tiny_models import write_tiny_checkpoint

RESULTS = Path(__file__).parent / "results" / "grammar_overhead.json"
VOCAB_SIZE = 32_000
BATCH = 16
RECORD = {
    "type": "object",
    "properties": {f"field_{i:02}": {"type": ("string", "integer", "boolean")[i % 3]} for i in range(20)},
    "required": [f"field_{i:02}" for i in range(20)],
}
LIST = {"type": "array", "items": {"type": "string"}, "minItems": 4}  # most other grammars end within a few steps
GRAMMARS: dict[str, dict[str, Any]] = {
    "20-field record": {"json_schema": RECORD},
    "list of strings": {"json_schema": LIST},
    "regex": {"regex": r"([A-Za-z]+[ ,])+[.]"},
    "ebnf": {"ebnf": 'root ::= item ("," item)*\nitem ::= [a-z]+ | "(" root ")"'},
}


class StepClock:
    """A plugin that records the time at which each step ends, and the number of tokens that the step generates."""

    def __init__(self) -> None:
        self.ends: list[tuple[float, int]] = []

    @hookimpl
    def step_finished(self, record: StepRecord) -> None:
        """Record a step."""
        self.ends.append((time.perf_counter(), record.num_decodes))

    def take(self) -> list[float]:
        """Return the durations of steps that decoded the full batch, in seconds, and clear the records."""
        ends, self.ends = self.ends, []
        return [late - early for (early, before), (late, num) in itertools.pairwise(ends) if num == before == BATCH]


def write_model(folder: Path) -> Path:
    """Write the model, with a tokenizer trained on the standard library."""
    path = write_tiny_checkpoint(
        folder,
        hidden_size=768,
        intermediate_size=2048,
        num_layers=12,
        num_heads=12,
        num_kv_heads=4,
        head_dim=64,
        vocab_size=VOCAB_SIZE,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        initializer_range=0.02,
        eos_token_id=0,
    )
    core = tokenizers.Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=["<end>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    core.train([str(file) for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))], trainer)
    transformers.PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<end>").save_pretrained(path)
    return path


def params(steps: int, seed: int, **grammar: Any) -> SamplingParams:
    """Return sampling parameters with which a request generates exactly `steps` tokens."""
    return SamplingParams(temperature=1.0, seed=seed, max_tokens=steps, min_tokens=steps, ignore_eos=True, **grammar)


def step_seconds(engine: Engine, clock: StepClock, steps: int, seed: int, **grammar: Any) -> list[float]:
    """Run a batch and return the durations of its steps in seconds."""
    prompts = [[1 + (seed * BATCH + i) % 300, 5, 9] for i in range(BATCH)]
    clock.take()
    engine.generate(prompts, [params(steps, seed * BATCH + i, **grammar) for i in range(BATCH)])
    return clock.take()


def overheads(model: Path, overlap: bool, steps: int, rounds: int, backends: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield the overhead of each backend for each grammar."""
    clock = StepClock()
    config = {"grammar": {"jump_forward": False}, "scheduling": {"overlap": overlap}, "memory": {"kv_tokens": 16384}}
    with Engine(model=str(model), plugins=[clock], **config) as engine:
        for backend in backends:
            for name, grammar in GRAMMARS.items():
                asked = grammar | {"grammar_backend": backend}
                try:
                    step_seconds(engine, clock, 8, 0, **asked)
                except Exception as error:
                    print(f"{backend:11} {name:16} refused: {str(error)[:80]}")
                    continue
                pairs = [pair(engine, clock, steps, i, asked) for i in range(rounds)]
                yield {
                    "backend": backend,
                    "grammar": name,
                    "overlap": overlap,
                    "free_ms": round(statistics.median(free for free, _ in pairs) * 1e3, 2),
                    "constrained_ms": round(statistics.median(bound for _, bound in pairs) * 1e3, 2),
                    **summary([bound / free - 1 for free, bound in pairs]),
                }


def pair(engine: Engine, clock: StepClock, steps: int, i: int, asked: dict[str, Any]) -> tuple[float, float]:
    """Return the median time in seconds of a step without and of a step with a grammar, from two consecutive runs."""
    medians: dict[bool, float] = {}
    for is_bound in (False, True) if i % 2 else (True, False):
        seconds = step_seconds(engine, clock, steps, 2 * i + is_bound, **(asked if is_bound else {}))
        medians[is_bound] = statistics.median(seconds)
    return medians[False], medians[True]


def summary(overheads: list[float]) -> dict[str, float]:
    """Return the median and its standard error: 1.25 times that of the mean, as for a normal distribution."""
    low, middle, high = statistics.quantiles(overheads, n=4)
    error = 1.25 * (high - low) / 1.35 / len(overheads) ** 0.5
    return {"overhead": round(middle, 4), "standard_error": round(error, 4)}


async def gaps(engine: Engine, steps: int, others: Sequence[dict[str, Any]]) -> list[float]:
    """Return the times between tokens of 8 requests, in seconds; `others` are requests with new grammars."""
    found: list[float] = []

    async def follow(i: int) -> None:
        last = None
        async for _ in engine.astream([7, 8, 9 + i], params(steps, i)):
            now = time.perf_counter()
            if last is not None:
                found.append(now - last)
            last = now

    async def compile_one(i: int, grammar: dict[str, Any]) -> None:
        await asyncio.sleep(0.3 + 0.5 * i)
        (output,) = await engine.agenerate("x", SamplingParams(max_tokens=1, **grammar))
        if output.finish_reason is FinishReason.ERROR:
            raise RuntimeError(output.completions[0].error)

    await asyncio.gather(*[follow(i) for i in range(8)], *[compile_one(i, one) for i, one in enumerate(others)])
    return found


def compile_delays(model: Path, steps: int, backends: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield each backend's longest time between tokens, with and without simultaneous compilation."""
    with Engine(model=str(model), memory={"kv_tokens": 16384}) as engine:
        for backend in backends:
            schemas = [
                {"type": "object", "properties": {f"f{i}_{k}": {"type": "string"} for k in range(600)}}
                for i in range(3)
            ]
            others = [{"json_schema": schema, "grammar_backend": backend} for schema in schemas]
            try:
                engine.generate(
                    "x", SamplingParams(max_tokens=1, json_schema={"type": "null"}, grammar_backend=backend)
                )
                quiet = asyncio.run(gaps(engine, steps, []))
                busy = asyncio.run(gaps(engine, steps, others))
            except Exception as error:
                print(f"{backend:11} 600 fields: refused: {str(error)[:90]}")
                continue
            yield {
                "backend": backend,
                "median_ms": round(statistics.median(quiet) * 1e3, 1),
                "longest_without_ms": round(max(quiet) * 1e3, 1),
                "longest_with_ms": round(max(busy) * 1e3, 1),
                "median_with_ms": round(statistics.median(busy) * 1e3, 1),
            }


def main() -> None:
    """Print the tables and save them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--overlap", choices=["on", "off", "both"], default="both", help="scheduling.overlap")
    names = Registry.load().names("grammar")
    parser.add_argument("--backend", action="append", choices=names, help="one of several; all unless said")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    backends = args.backend or names
    results: dict[str, list[dict[str, Any]]] = {"steps": [], "compiling": []}
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder))
        for overlap in {"on": (True,), "off": (False,), "both": (True, False)}[args.overlap]:
            for row in overheads(model, overlap, args.steps, args.rounds, backends):
                results["steps"].append(row)
                print(
                    f"{row['backend']:11} {row['grammar']:16} overlap {row['overlap']!s:5}: free {row['free_ms']:6.2f} "
                    f"ms, constrained {row['constrained_ms']:6.2f}: {row['overhead']:+.1%} "
                    f"± {row['standard_error']:.1%}",
                    flush=True,
                )
        for row in compile_delays(model, 10 * args.steps, backends):
            results["compiling"].append(row)
            print(
                f"{row['backend']:11} between two tokens while 600-field schemas compile {row['median_with_ms']} ms, "
                f"at most {row['longest_with_ms']}; without {row['median_ms']}, at most {row['longest_without_ms']}",
                flush=True,
            )
    args.out.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
