"""Measures the time that the lower tiers of the cache save, and the time that they cost.

    python benchmarks/hicache.py [--prompt-tokens N] [--json FILE]

A random model of 100M parameters answers one long prompt in four states: nothing is cached; the prompt's blocks are in
host memory; they are in files, which were written before a restart; all pages of the prompt are on the device. A second
measurement uses prompts without a common prefix, with and without copies to host memory and to files. It shows the cost
of writing every block.
"""

import argparse
import json
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from graftlm import Engine, EngineConfig, SamplingParams
from graftlm.testing.tiny_models import write_tiny_checkpoint

VOCAB_SIZE = 32000


def write_model(folder: Path) -> Path:
    """Write a Llama of 100M parameters."""
    write_tiny_checkpoint(
        folder,
        family="llama",
        seed=0,
        hidden_size=768,
        num_layers=10,
        num_heads=12,
        num_kv_heads=4,
        head_dim=64,
        vocab_size=VOCAB_SIZE,
        max_position_embeddings=8192,
        tokenizer=True,
    )
    return folder


def make_engine(model: Path, kv_tokens: int, cache: str = "hicache", **options: Any) -> Engine:
    """Return an engine in float32 on the CPU."""
    return Engine(
        EngineConfig.load(
            {"model": {"path": str(model), "dtype": "float32", "device": "cpu"}},
            cache={"name": cache, "page_size": 16, "options": options},
            memory={"kv_tokens": kv_tokens},
        )
    )


def make_prompt(seed: int, num_tokens: int) -> list[int]:
    """Return random tokens."""
    tokens: list[int] = np.random.default_rng(seed).integers(1, VOCAB_SIZE, num_tokens).tolist()
    return tokens


@dataclass(frozen=True, slots=True)
class Taken:
    """Wall time and CPU time of a run, in seconds; other load on the machine affects CPU time less."""

    wall_s: float
    cpu_s: float


def answer(engine: Engine, prompts: list[list[int]]) -> tuple[Taken, dict[str, int]]:
    """Generate one token for each prompt; return the time, and tier -> number of the first prompt's cached tokens."""
    start, cpu_start = time.perf_counter(), time.process_time()
    outputs = engine.generate(prompts, SamplingParams(temperature=0, max_tokens=1))
    taken = Taken(time.perf_counter() - start, time.process_time() - cpu_start)
    return taken, outputs[0].usage.cached_tokens_by_tier


def measure_reuse(model: Path, folder: Path, num_tokens: int, repeats: int) -> dict[str, list[Taken]]:
    """Return state of the prompt's blocks -> TTFT in each repeat."""
    storage = {"name": "file", "options": {"path": str(folder)}, "prefetch": "wait_complete"}
    seconds: dict[str, list[Taken]] = {"nothing": [], "host": [], "storage": [], "device": []}
    for repeat in range(repeats):
        prompt, others = make_prompt(2 * repeat, num_tokens), make_prompt(2 * repeat + 1, num_tokens)
        with make_engine(model, num_tokens + 64, host_tokens=4 * num_tokens, storage=storage) as engine:
            answer(engine, [[1, 2, 3]])
            for place in ("nothing", "device", "host"):
                if place == "host":
                    answer(engine, [others])  # evicts the prompt from the device
                taken, tiers = answer(engine, [prompt])
                assert place == "nothing" or tiers[place] > 0.9 * num_tokens, (place, tiers)
                seconds[place].append(taken)
        with make_engine(model, num_tokens + 64, host_tokens=4 * num_tokens, storage=storage) as engine:
            answer(engine, [[1, 2, 3]])
            taken, tiers = answer(engine, [prompt])
            assert tiers["storage"] > 0.9 * num_tokens, tiers
            seconds["storage"].append(taken)
    return seconds


def measure_cost(model: Path, folder: Path, num_prompts: int, repeats: int) -> dict[str, list[Taken]]:
    """Return written tiers -> times for prompts of 512 tokens without a common prefix."""
    settings: dict[str, dict[str, Any]] = {
        "radix": {"cache": "radix"},
        "host": {"host_tokens": 65536},
        "host and files": {"host_tokens": 65536, "storage": {"name": "file", "options": {"path": str(folder)}}},
    }
    seconds: dict[str, list[Taken]] = {name: [] for name in settings}
    for repeat in range(repeats):
        prompts = [make_prompt(1000 * repeat + i, 512) for i in range(num_prompts)]
        for name, options in settings.items():
            with make_engine(model, 4096, **options) as engine:
                answer(engine, [[1, 2, 3]])
                seconds[name].append(answer(engine, prompts)[0])
    return seconds


def show(seconds: dict[str, list[Taken]], title: str) -> None:
    """Print the median and range of each case, and its speed-up over the first case: of the medians, and of pairs."""
    print(title)
    for clock in ("wall_s", "cpu_s"):
        sides = {name: [getattr(one, clock) for one in taken] for name, taken in seconds.items()}
        first = next(iter(sides.values()))
        for name, taken in sides.items():
            pairs = [theirs / ours for theirs, ours in zip(first, taken, strict=True)]
            print(
                f"  {clock:6} {name:16} {statistics.median(taken):8.3f} s ({min(taken):.3f} to {max(taken):.3f}), "
                f"{statistics.median(first) / statistics.median(taken):6.2f}x ({min(pairs):.2f} to {max(pairs):.2f})",
                flush=True,
            )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompt-tokens", type=int, default=2048)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder) / "model")
        reuse = measure_reuse(model, Path(folder) / "reuse", arguments.prompt_tokens, arguments.repeats)
        cost = measure_cost(model, Path(folder) / "cost", arguments.prompts, arguments.repeats)
    show(reuse, f"first token of {arguments.prompt_tokens} prompt tokens, by where their keys and values are")
    show(cost, f"{arguments.prompts} prompts of 512 tokens that share nothing, by what is written")
    if arguments.json:
        text = json.dumps(
            {
                name: {place: [asdict(one) for one in taken] for place, taken in seconds.items()}
                for name, seconds in (("first_token", reuse), ("cost", cost))
            },
            indent=2,
        )
        arguments.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
