"""Measures the throughput with low-rank adapters, and the time to load an adapter.

    python benchmarks/lora.py [--runs N] [--out FILE]

The model is a random Llama of 57 million parameters in bfloat16; random adapters of rank 16 change every projection.
Four kinds of batches alternate in one run. One kind runs on an engine without a `lora` section. The other three run on
an engine with four adapters: no request has an adapter; all requests have the same adapter; the requests cycle through
no adapter and the four adapters.
"""

import argparse
import json
import logging
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from graftlm import Engine, SamplingParams
from graftlm.testing.tiny_adapters import write_tiny_adapter
from graftlm.testing.tiny_models import write_tiny_checkpoint

RESULTS = Path(__file__).parent / "results" / "lora.json"
NAMES = ("a", "b", "c", "d")
RANK = 16
NUM_TOKENS = 12
#: Kind of batch -> adapters through which its requests cycle; None: an engine without a `lora` section.
KINDS: dict[str, tuple[str | None, ...] | None] = {
    "no lora section": None,
    "no adapter": (None,),
    "one adapter": ("a",),
    "four adapters and none": (*NAMES, None),
}
#: (number of requests, tokens of each prompt): decode only, then prefill only.
SHAPES = {"decode, 1 request": (1, 4), "decode, 16 requests": (16, 4), "prefill, 16 x 64": (16, 64)}


@dataclass(frozen=True, slots=True)
class Row:
    """The results for one shape of batch: kind of batch -> tokens per second, medians over the runs."""

    shape: str
    tokens_per_s: dict[str, float]


def measure(engines: dict[bool, Engine], shape: str, num_runs: int) -> Row:
    """Run every kind of batch with one shape; the kinds alternate."""
    num_requests, prompt_len = SHAPES[shape]
    found: dict[str, list[float]] = {kind: [] for kind in KINDS}
    max_tokens = 1 if shape.startswith("prefill") else NUM_TOKENS
    rng = np.random.default_rng(1)
    for _ in range(num_runs + 1):
        for kind, names in KINDS.items():
            prompts = rng.integers(1, 300, (num_requests, prompt_len)).tolist()
            adapters = None if names is None else [names[i % len(names)] for i in range(num_requests)]
            params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
            start_s = time.perf_counter()
            engines[names is not None].generate(prompts, params, adapter=adapters)
            num_tokens = num_requests * (prompt_len if max_tokens == 1 else max_tokens)
            found[kind].append(num_tokens / (time.perf_counter() - start_s))
    return Row(shape, {kind: round(statistics.median(rates[1:]), 1) for kind, rates in found.items()})


def loading_s(engine: Engine, folder: Path) -> float:
    """Return the time to load an adapter in seconds, with its files in the page cache."""
    start_s = time.perf_counter()
    engine.load_adapter("more", folder)
    seconds = time.perf_counter() - start_s
    engine.unload_adapter("more")
    return seconds


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    logging.basicConfig(format="%(message)s")
    logging.getLogger("graftlm").setLevel(logging.INFO)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        base = write_tiny_checkpoint(
            folder / "base", hidden_size=768, intermediate_size=3072, num_layers=6, num_heads=12, num_kv_heads=12,
            head_dim=64, vocab_size=320, max_position_embeddings=1024, initializer_range=0.02, dtype=torch.bfloat16,
            tokenizer=True,
        )  # fmt: skip
        for seed, adapter in enumerate(NAMES):
            config = {"r": RANK, "lora_alpha": RANK, "target_modules": "all-linear"}
            write_tiny_adapter(folder / adapter, base, seed, deviation=0.02, **config)
        sections = {"model": str(base), "memory": {"kv_tokens": 8192}, "cache": {"name": "chunk"}}
        lora = {"adapters": {name: str(folder / name) for name in NAMES}, "max_rank": RANK}
        with Engine(sections) as plain, Engine(sections | {"lora": lora}) as adapted:
            rows = [measure({False: plain, True: adapted}, shape, arguments.runs) for shape in SHAPES]
            load_ms = round(statistics.median(loading_s(adapted, folder / "a") for _ in range(5)) * 1e3, 1)
    for row in rows:
        base_rate = row.tokens_per_s["no lora section"]
        shown = ", ".join(f"{kind} {rate:.1f} ({rate / base_rate:.2f})" for kind, rate in row.tokens_per_s.items())
        print(f"{row.shape}: {shown}")
    print(f"loading an adapter: {load_ms} ms")
    arguments.out.parent.mkdir(exist_ok=True)
    arguments.out.write_text(json.dumps({"load_ms": load_ms, "rows": [asdict(row) for row in rows]}, indent=2) + "\n")


if __name__ == "__main__":
    main()
