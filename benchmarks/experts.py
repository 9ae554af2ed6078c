"""Measures a layer of experts: Transformers' code, and graftlm's with plain, packed and quantized weights.

    python benchmarks/experts.py [--rounds N] [--threads N] [--out FILE]

The layer has 64 experts; each token is routed to 8 random ones. The hidden size is 1,024; the
intermediate size of an expert is 512. Quantization is in groups of 64. The variants alternate; figures are medians in
milliseconds per call.
"""

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from graftlm.layers import Experts, Routing, pack_linears, softmax_top_k
from graftlm_quantization.options import Int4Options, Int8Options
from graftlm_quantization.weight_only import WeightOnly

RESULTS = Path(__file__).parent / "results" / "experts.json"
NUM_EXPERTS, TOP_K, HIDDEN, SIZE = 64, 8, 1024, 512
TOKENS = (1, 16, 256)
DTYPES = (torch.bfloat16, torch.float32)
CALLS_PER_TURN = {1: 20, 16: 4, 256: 1}


def make_variants(dtype: torch.dtype) -> dict[str, Callable[[Tensor, Routing], Tensor]]:
    """Return variant -> function that computes the layer."""
    plain = Experts(NUM_EXPERTS, HIDDEN, SIZE, "silu", device=torch.device("cpu"), dtype=dtype)
    for parameter in plain.parameters():
        parameter.copy_(torch.randn(parameter.shape) / HIDDEN**0.5)
    variants: dict[str, Callable[[Tensor, Routing], Tensor]] = {"Transformers": _transformers(plain), "plain": plain}
    quantizations = {
        "packed": None,
        "int8": WeightOnly(8, 64, Int8Options()),
        "int4": WeightOnly(4, 64, Int4Options()),
    }
    for name, quantization in quantizations.items():
        experts = copy.deepcopy(plain)
        experts.gate_up.quantize_with(quantization)
        experts.down.quantize_with(quantization)
        pack_linears(experts)
        variants[name] = experts
    return variants


def _transformers(experts: Experts) -> Callable[[Tensor, Routing], Tensor]:
    config = Qwen3MoeConfig(
        num_experts=NUM_EXPERTS, num_experts_per_tok=TOP_K, hidden_size=HIDDEN, moe_intermediate_size=SIZE
    )
    config._experts_implementation = "eager"
    theirs = Qwen3MoeExperts(config)
    theirs.gate_up_proj, theirs.down_proj = experts.gate_up.weight, experts.down.weight
    return lambda x, routing: theirs(x, routing.expert_ids, routing.weights.to(x.dtype))


def measure(rounds: int) -> list[dict[str, Any]]:
    """Time every variant for each dtype and each number of tokens."""
    rows = []
    for dtype in DTYPES:
        variants = make_variants(dtype)
        for num_tokens in TOKENS:
            x = torch.randn(num_tokens, HIDDEN).to(dtype)
            routing = softmax_top_k(TOP_K, renormalise=True)(torch.randn(num_tokens, NUM_EXPERTS))
            times = in_turns({name: _call(layer, x, routing) for name, layer in variants.items()}, rounds)
            rows.append({"dtype": str(dtype).removeprefix("torch."), "tokens": num_tokens} | times)
    return rows


def _call(layer: Callable[[Tensor, Routing], Tensor], x: Tensor, routing: Routing) -> Callable[[], float]:
    """Return a function that calls the layer and returns the time in milliseconds."""

    def run() -> float:
        count = CALLS_PER_TURN[len(x)]
        start = time.perf_counter()
        for _ in range(count):
            layer(x, routing)
        return 1e3 * (time.perf_counter() - start) / count

    return run


def in_turns(runs: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, float]:
    """Call the functions alternately; return name -> median of the results, without the first round."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for round_idx in range(rounds + 1):
        for name, run in runs.items():
            value = run()
            if round_idx:
                times[name].append(value)
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    with torch.inference_mode():
        rows = measure(args.rounds)
    table = Table(*rows[0], title="One layer of experts, ms a call")
    for row in rows:
        table.add_row(*(f"{value:,.2f}" if isinstance(value, float) else str(value) for value in row.values()))
    Console(width=120).print(table)
    results = {"cpu": torch.cpu.get_capabilities().get("cpu_name"), "threads": args.threads, "rows": rows}
    args.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
