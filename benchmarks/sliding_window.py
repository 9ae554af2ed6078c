"""Measures the hit rate of a model with sliding windows, with one KV memory for all layers and with two.

    python benchmarks/sliding_window.py [--chats N] [--turns N] [--json FILE]

A random model with five window layers for each full layer serves alternating chats with a common system prompt. Sizes
of KV memory are the number of tokens times the number of layers, so that one memory for all layers and two separate
memories can be compared.
"""

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

import graftlm
from graftlm import Engine, SamplingParams
from graftlm.testing.tiny_models import write_tiny_checkpoint

WINDOW_TOKENS = 32
WINDOW_LAYERS, FULL_LAYERS = 5, 1
MAX_TOKENS = 20

#: (cache, tokens in the memory of the full layers, tokens in the memory of the window layers)
CASES = [("radix", 4000, None), ("swa_radix", 10_000, 2800), ("radix", 10_000, None)]


def measure(path: Path, num_chats: int, num_turns: int, case: tuple[str, int, int | None]) -> dict[str, Any]:
    """Run the first turn of all chats, then the second turn, and so on; return the numbers of cached tokens."""
    cache, kv_tokens, window_tokens = case
    memory = {"kv_tokens": kv_tokens} | ({} if window_tokens is None else {"window_tokens": window_tokens})
    draw = np.random.default_rng(1)
    chats = [[7] * 100 for _ in range(num_chats)]
    prompt_tokens = cached_tokens = 0
    started = time.perf_counter()
    with Engine(
        model=str(path),
        cache={"name": cache, "page_size": 4},
        memory=memory,
        scheduling={"max_running_requests": 8, "prefill_tokens_per_step": 128},
    ) as engine:
        for _ in range(num_turns):
            for chat in chats:
                chat += draw.integers(1, 320, 40).tolist()
            outputs = engine.generate(
                chats, SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True), progress=False
            )
            for chat, output in zip(chats, outputs, strict=True):
                prompt_tokens += output.usage.prompt_tokens
                cached_tokens += output.usage.cached_tokens
                chat += output.token_ids
        retractions = engine.stats().retractions
    layer_tokens = kv_tokens * FULL_LAYERS + (kv_tokens if window_tokens is None else window_tokens) * WINDOW_LAYERS
    return {
        "cache": cache,
        "layer_tokens": layer_tokens,
        "prompt_tokens": prompt_tokens,
        "cached_share": cached_tokens / prompt_tokens,
        "retractions": retractions,
        "wall_s": time.perf_counter() - started,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chats", type=int, default=24)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--json", type=Path, help="save the figures here")
    arguments = parser.parse_args()
    layer_types = ["sliding_attention"] * WINDOW_LAYERS + ["full_attention"] * FULL_LAYERS
    with tempfile.TemporaryDirectory() as folder:
        path = write_tiny_checkpoint(
            Path(folder),
            "gemma2",
            num_layers=len(layer_types),
            hidden_size=32,
            num_heads=2,
            num_kv_heads=1,
            max_position_embeddings=1024,
            tokenizer=True,
            config={"sliding_window": WINDOW_TOKENS, "layer_types": layer_types},
        )
        results = [measure(path, arguments.chats, arguments.turns, case) for case in CASES]
    print(f"{'cache':<12}{'memory, tokens of a layer':>28}{'found in the cache':>22}{'retractions':>14}")
    for r in results:
        print(f"{r['cache']:<12}{r['layer_tokens']:>28,}{r['cached_share']:>22.1%}{r['retractions']:>14}")
    if arguments.json:
        meta = {"graftlm": graftlm.__version__, "cpus": os.cpu_count(), "results": results}
        arguments.json.write_text(json.dumps(meta, indent=2) + "\n")


if __name__ == "__main__":
    main()
