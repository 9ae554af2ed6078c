"""Measures 8-bit keys and values: speed and error of attention, and accuracy of the bundled model.

    python benchmarks/kv_dtype.py [--only speed error accuracy] [--rounds N] [--out FILE]

Speed: the compiled kernel computes decode steps for several context lengths and batch sizes; steps with bfloat16 and
with int8 alternate. The number of layers is large enough that the keys and values do not stay in the CPU caches. The
result is the fastest round, because other programs affect it least.

Error: attention over random keys and values in several 8-bit formats is compared with float32; errors are relative to
the size of the outputs. In one case a few dimensions of the keys are far larger than the rest, as in many models.

Accuracy: the bundled model answers held-out questions with each format.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from quantization import measure_accuracy, show
from rich.console import Console
from torch import Tensor

from graftlm.contracts import AttentionContext, AttentionLayer
from graftlm.execution.kv_store import KVStore
from graftlm.layers import encode_int8
from graftlm.testing.batches import make_batch
from graftlm_attention import TorchNativeOptions
from graftlm_attention.torch_native import create_torch_native

RESULTS = Path(__file__).parent / "results" / "kv_dtype.json"
SHAPES = {"16 heads on 4 of 64": (16, 4, 64), "32 heads on 8 of 128": (32, 8, 128)}
CONTEXTS, BATCHES, PAGE_SIZE = (1024, 8192, 32768), (1, 8), 16
CACHE_BYTES = 256 * 2**20  # minimum size of the keys and values in bfloat16: several times the size of CPU caches
MAX_BYTES = 3 * 2**30
FP8_MAX = 448.0
VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "float32": {"model": {"dtype": "float32"}},
    "float32, keys and values in int8": {"model": {"dtype": "float32"}, "memory": {"kv_dtype": "int8"}},
    "bfloat16": {"model": {"dtype": "bfloat16"}},
    "bfloat16, keys and values in int8": {"model": {"dtype": "bfloat16"}, "memory": {"kv_dtype": "int8"}},
}


def measure_speed(rounds: int) -> list[dict[str, Any]]:
    """Time decode steps for every shape, context length and batch size."""
    return [
        _time_case(name, AttentionLayer(0, *shape, scale=shape[-1] ** -0.5), num_requests, context, rounds)
        for name, shape in SHAPES.items()
        for num_requests in BATCHES
        for context in CONTEXTS
        if num_requests * context * KVStore.bytes_per_token([_layer(shape)], torch.bfloat16) <= MAX_BYTES
    ]


def _layer(shape: Sequence[int], layer_id: int = 0) -> AttentionLayer:
    num_heads, num_kv_heads, head_dim = shape
    return AttentionLayer(layer_id, num_heads, num_kv_heads, head_dim, scale=head_dim**-0.5)


def _time_case(name: str, layer: AttentionLayer, num_requests: int, context: int, rounds: int) -> dict[str, Any]:
    layer_bytes = num_requests * context * KVStore.bytes_per_token([layer], torch.bfloat16)
    num_layers = -(-CACHE_BYTES // layer_bytes)
    layers = [_layer((layer.num_heads, layer.num_kv_heads, layer.head_dim), i) for i in range(num_layers)]
    steps = {
        "bf16": _step(layers, num_requests, context, torch.bfloat16),
        "int8": _step(layers, num_requests, context, torch.int8),
    }
    fastest = _in_turns(steps, rounds)
    return {
        "heads": name,
        "requests": num_requests,
        "context": context,
        **{f"{variant}_us": 1e6 * seconds / num_layers for variant, seconds in fastest.items()},
        "bf16_gb_per_s": layer_bytes * num_layers / fastest["bf16"] / 1e9,
        "speedup": fastest["bf16"] / fastest["int8"],
    }


def _step(
    layers: Sequence[AttentionLayer], num_requests: int, context: int, kv_dtype: torch.dtype
) -> Callable[[], None]:
    """Return a function that computes attention of one step in all layers, over scattered pages."""
    pages_each, dtype, device = -(-context // PAGE_SIZE), torch.bfloat16, torch.device("cpu")
    pages = torch.randperm(num_requests * pages_each, generator=torch.Generator().manual_seed(0))
    store = KVStore(layers, len(pages), PAGE_SIZE, kv_dtype, device)
    for layer in layers:
        _fill(store, layer.layer_id)
    batch = make_batch([([0], context - 1)] * num_requests, pages.view(num_requests, -1).tolist(), PAGE_SIZE)
    backend = create_torch_native(
        TorchNativeOptions(kernel="native"),
        AttentionContext(layers, store, PAGE_SIZE, device, dtype, num_requests, context),
    )
    backend.prepare(batch)
    q = torch.randn(num_requests, layers[0].num_heads, layers[0].head_dim).to(dtype)
    k, v = torch.randn(2, num_requests, layers[0].num_kv_heads, layers[0].head_dim).to(dtype)

    def run() -> None:
        for layer in layers:
            backend.forward(q, k, v, layer)

    return run


def _fill(store: KVStore, layer_id: int) -> None:
    for tensor in store.stored(layer_id):
        if tensor.dtype == torch.int8:
            tensor.random_(-127, 128)
        else:
            tensor.fill_(0.01)


def _in_turns(runs: Mapping[str, Callable[[], None]], rounds: int) -> dict[str, float]:
    """Call the functions alternately; return name -> shortest time in seconds, without the first round."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for round_idx in range(rounds + 1):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            if round_idx:
                times[name].append(time.perf_counter() - start)
    return {name: min(values) for name, values in times.items()}


def measure_error(num_tokens: int = 2048, head_dim: int = 128) -> list[dict[str, Any]]:
    """Compare attention of 256 random queries over keys and values in several formats with attention in float32."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(n, head_dim, generator=generator) for n in (256, num_tokens, num_tokens))
    outliers = torch.ones(head_dim)
    outliers[:4] = 20.0
    return list(_errors("normal", q, k, v)) + list(_errors("4 of 128 dimensions of keys 20 times", q, k * outliers, v))


def _errors(case: str, q: Tensor, k: Tensor, v: Tensor) -> Iterator[dict[str, Any]]:
    def attend(k: Tensor, v: Tensor) -> Tensor:
        return torch.softmax(q @ k.T * k.shape[-1] ** -0.5, dim=-1) @ v

    exact = attend(k, v)
    for name, held in _HELD.items():
        error = attend(held(k), held(v)) - exact
        yield {"numbers": case, "held in": name, "relative error": float(error.norm() / exact.norm())}


def _int8(rows: Tensor) -> Tensor:
    codes, scales = encode_int8(rows)
    return codes * scales.float().unsqueeze(-1)


def _fp8(rows: Tensor) -> Tensor:
    return rows.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).float()


def _scaled_fp8(rows: Tensor) -> Tensor:
    scales = rows.abs().amax(dim=-1, keepdim=True) / FP8_MAX
    return _fp8(rows / scales) * scales


_HELD: Mapping[str, Callable[[Tensor], Tensor]] = {
    "bfloat16": lambda rows: rows.to(torch.bfloat16).float(),
    "int8, a scale per token and head": _int8,
    "fp8, no scale": _fp8,
    "fp8, a scale per token and head": _scaled_fp8,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=("speed", "error", "accuracy"))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    wanted = args.only or ("speed", "error", "accuracy")
    console, results = Console(width=140), json.loads(args.out.read_text()) if args.out.exists() else {}
    results |= {"cpu": torch.cpu.get_capabilities().get("cpu_name"), "threads": torch.get_num_threads()}
    if "speed" in wanted:
        results["speed"] = measure_speed(args.rounds)
        show(console, "One layer's attention, microseconds a step", results["speed"])
    if "error" in wanted:
        results["error"] = measure_error()
        show(console, "Attention over rounded keys and values", results["error"])
    if "accuracy" in wanted:
        results["accuracy"] = measure_accuracy(VARIANTS)
        show(console, "The bundled model", [{"": name} | row for name, row in results["accuracy"].items()])
    args.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
