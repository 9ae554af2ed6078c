"""Measures models with a recurrent state: decode, prompts, long contexts, and the cost of snapshots.

    python benchmarks/recurrent_models.py [--model lfm2 qwen3_5 granite mamba2] [--rounds N] [--prompt N] [--json FILE]

The models are random, in bfloat16, with about 400M parameters. Each measurement is repeated; the best of the rounds is
shown, and the parts of a comparison alternate within a round. The script measures:

    bandwidth_share              bytes of weights per second at decode of one request, divided by the read bandwidth
    prompt_speedup               time of a prompt in Transformers, divided by the time to first token
    context_32k_over_512         time per token at a context of 32k tokens, divided by that at 512 tokens
    unshared_chunk_over_radix    time to first token with `chunk`, divided by that with `radix`, without common prefixes
    stored_states                number of snapshots at the end
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from graftlm import Engine, SamplingParams
from graftlm.testing.tiny_models import Family, write_tiny_checkpoint

_DELTA = {"linear_key_head_dim": 64, "linear_value_head_dim": 64, "linear_num_key_heads": 16}
#: Name -> family, number of layers and further arguments of `write_tiny_checkpoint`.
MODELS: dict[str, tuple[Family, int, dict[str, Any]]] = {
    "lfm2": (
        "lfm2",
        16,
        {
            "intermediate_size": 4608,
            "head_dim": 64,
            "config": {"full_attn_idxs": [2, 5, 8, 10, 12, 14], "conv_bias": False},
        },
    ),
    "qwen3_5": (
        "qwen3_5_text",
        20,
        {
            "intermediate_size": 3584,
            "head_dim": 128,
            "config": {**_DELTA, "linear_num_value_heads": 32, "full_attention_interval": 4},
        },
    ),
    "granite": (
        "granitemoehybrid",
        24,
        {
            "intermediate_size": 2048,
            "head_dim": 64,
            "config": {
                "num_local_experts": 0,
                "shared_intermediate_size": 2560,
                "mamba_n_heads": 32,
                "mamba_n_groups": 1,
                "mamba_d_state": 128,
            },
        },
    ),
    "mamba2": (
        "mamba2",
        48,
        {
            "intermediate_size": 1024,
            "config": {"num_heads": 32, "head_dim": 64, "state_size": 128, "n_groups": 1},
        },
    ),
}
HIDDEN, VOCAB, CONTEXT = 1024, 32_768, 33_792
_READ_BYTES = 1 << 30


def write_model(folder: Path, name: str) -> None:
    """Write a random checkpoint."""
    family, num_layers, sizes = MODELS[name]
    write_tiny_checkpoint(
        folder,
        family,
        hidden_size=HIDDEN,
        num_layers=num_layers,
        num_heads=16,
        num_kv_heads=8,
        vocab_size=VOCAB,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        initializer_range=0.02,
        tokenizer=True,
        dtype=torch.bfloat16,
        **sizes,
    )


def start(folder: Path, cache: str = "radix") -> Engine:
    """Start an engine for few requests."""
    return Engine(
        model={"path": str(folder), "dtype": "bfloat16", "device": "cpu"},
        cache={"name": cache},
        scheduling={"max_running_requests": 4},
        memory={"kv_tokens": 2 * CONTEXT},
    )


def prompt(seed: int, num_tokens: int) -> list[int]:
    """Return random tokens."""
    tokens: list[int] = np.random.default_rng(seed).integers(10, VOCAB, num_tokens).tolist()
    return tokens


def timed(call: Callable[[], Any]) -> float:
    """Return the duration of a call in seconds."""
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def read_bandwidth(rounds: int) -> float:
    """Return the bandwidth of a sum over 1 GiB, in bytes per second."""
    data = torch.ones(_READ_BYTES // 4)
    return _READ_BYTES / min(timed(data.sum) for _ in range(rounds))


def seconds_per_token(engine: Engine, seed: int, context: int, num_tokens: int = 48) -> float:
    """Return the time per decoded token of one request whose prompt has `context` tokens."""
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    timings = engine.generate([prompt(seed, context)], params)[0].timings
    return float(timings.total_s - timings.first_token_s) / (num_tokens - 1)


def first_token_s(engine: Engine, seed: int, num_tokens: int) -> float:
    """Return the time to first token of a prompt."""
    params = SamplingParams(temperature=0, max_tokens=1)
    return float(engine.generate([prompt(seed, num_tokens)], params)[0].timings.first_token_s)


def measure(name: str, rounds: int, prompt_len: int) -> dict[str, float]:
    """Return the figures of a model by name."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        write_model(folder, name)
        figures = measure_engine(folder, rounds, prompt_len)
        reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
        tokens = torch.tensor([prompt(0, prompt_len)])
        with torch.inference_mode():
            theirs = min(timed(lambda: reference(tokens, logits_to_keep=1)) for _ in range(max(1, rounds // 2)))
        num_parameters = sum(parameter.numel() for parameter in reference.parameters())
    figures["million_parameters"] = num_parameters / 1e6
    figures["prompt_speedup"] = theirs / figures["prompt_s"]
    bandwidth = read_bandwidth(rounds)
    figures["read_gb_per_s"] = bandwidth / 1e9
    figures["bandwidth_share"] = 2 * num_parameters / (figures["token_ms"] / 1e3) / bandwidth
    return {key: round(value, 4) for key, value in figures.items()}


def measure_engine(folder: Path, rounds: int, prompt_len: int) -> dict[str, float]:
    """Return the figures that need only the engine."""
    with start(folder) as radix, start(folder, "chunk") as chunk:
        engines = [("radix", radix), ("chunk", chunk)]
        for _, engine in engines:
            seconds_per_token(engine, 1, 64)
        first: dict[str, list[float]] = {"radix": [], "chunk": []}
        short, long = [], []
        for i in range(rounds):
            for label, engine in engines if i % 2 else engines[::-1]:
                first[label].append(first_token_s(engine, 1000 + i, prompt_len))
            short.append(seconds_per_token(radix, 2000 + i, 512))
            if i < 2:
                long.append(seconds_per_token(radix, 3000 + i, 32_768))
        states = radix.stats().states
        assert states is not None
        return {
            "prompt_s": min(first["radix"]),
            "unshared_chunk_over_radix": min(first["chunk"]) / min(first["radix"]),
            "token_ms": 1e3 * min(short),
            "context_32k_over_512": min(long) / min(short),
            "stored_states": states.num_stored,
        }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompt", type=int, default=4096)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results = {}
    for name in options.model:
        results[name] = measure(name, options.rounds, options.prompt)
        print(name, json.dumps(results[name]))
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
