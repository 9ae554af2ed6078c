"""Times one attention layer on a CPU: the compiled kernel, PyTorch's operations, and a floor.

    python benchmarks/attention_decode.py [--json FILE] [--match TEXT] [--seconds S]

The layer has the shape of a small model: H = 16, H_kv = 4, D = 64. Each figure is the time of the fastest of repeated
`forward` calls. The floor is the time to read the keys and values once, at the bandwidth that is measured by summing a
large tensor. A case whose keys and values fit into a CPU cache can be faster than the floor.
"""

import argparse
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from graftlm.contracts import AttentionContext, AttentionLayer, ForwardBatch
from graftlm.execution.kv_store import KVStore
from graftlm.testing.batches import make_batch
from graftlm_attention import TorchNativeOptions
from graftlm_attention.torch_native import create_torch_native

LAYER = AttentionLayer(layer_id=0, num_heads=16, num_kv_heads=4, head_dim=64, scale=0.125)
MIN_REPEATS = 3


@dataclass(frozen=True)
class Case:
    """A batch of requests with `context` tokens each; the last `new` are computed, the first `shared` are common."""

    requests: int
    context: int
    new: int
    dtype: str
    page_size: int
    shared: int = 0

    @property
    def name(self) -> str:
        """Name of the case in the table."""
        kind = "decode" if self.new == 1 else f"chunk of {self.new}"
        return f"{kind}, B={self.requests}, context {self.context}" + (f", {self.shared} shared" if self.shared else "")

    @property
    def kv_bytes(self) -> int:
        """Size of the keys and values in bytes; shared tokens are counted once."""
        tokens = self.shared + self.requests * (self.context - self.shared)
        return tokens * KVStore.bytes_per_token([LAYER], getattr(torch, self.dtype))


@dataclass(frozen=True)
class Row:
    """One case's times in microseconds."""

    case: str
    dtype: str
    page_size: int
    torch_us: float
    native_us: float
    floor_us: float


def cases() -> Iterator[Case]:
    for dtype in ("bfloat16", "float32"):
        for page_size in (1, 16):
            for requests in (1, 8, 64):
                for context in (512, 1088, 4096):
                    yield Case(requests, context, 1, dtype, page_size)
            yield Case(64, 1088, 1, dtype, page_size, shared=1024)
            yield Case(1, 512, 512, dtype, page_size)
            yield Case(1, 4608, 512, dtype, page_size)


def page_tables(case: Case) -> list[list[int]]:
    """Return the page numbers of each request, in scattered order; all begin with the shared pages."""
    shared = case.shared // case.page_size
    own = -(-case.context // case.page_size) - shared
    pages = torch.randperm(shared + case.requests * own, generator=torch.Generator().manual_seed(0)).tolist()
    common, pages = pages[:shared], pages[shared:]
    return [common + pages[own * b : own * (b + 1)] for b in range(case.requests)]


def build(case: Case) -> tuple[AttentionContext, ForwardBatch]:
    dtype, tables = getattr(torch, case.dtype), page_tables(case)
    num_pages = 1 + max(page for table in tables for page in table)
    store = KVStore([LAYER], num_pages, case.page_size, dtype, torch.device("cpu"))
    store.keys(0).normal_()
    store.values(0).normal_()
    requests = [([0] * case.new, case.context - case.new)] * case.requests
    context = AttentionContext([LAYER], store, case.page_size, torch.device("cpu"), dtype, case.requests, case.context)
    return context, make_batch(requests, tables, case.page_size)


def fastest_us(call: Callable[[], object], seconds: float) -> float:
    call()
    times: list[float] = []
    while len(times) < MIN_REPEATS or sum(times) < seconds:
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times) * 1e6


def measure(case: Case, bytes_per_us: float, seconds: float) -> Row:
    context, batch = build(case)
    q = torch.randn(batch.num_tokens, LAYER.num_heads, LAYER.head_dim).to(context.dtype)
    k, v = torch.randn(2, batch.num_tokens, LAYER.num_kv_heads, LAYER.head_dim).to(context.dtype)
    times = []
    for kernel in ("torch", "native"):
        backend = create_torch_native(TorchNativeOptions(kernel=kernel), context)
        backend.prepare(batch)
        times.append(fastest_us(lambda b=backend: b.forward(q, k, v, LAYER), seconds))  # type: ignore[misc]
    return Row(case.name, case.dtype, case.page_size, *times, floor_us=case.kv_bytes / bytes_per_us)


def bandwidth(seconds: float) -> float:
    """Return the bandwidth at which torch's threads read memory, in bytes per microsecond."""
    data = torch.ones(64 * 2**20)
    return data.nbytes / fastest_us(data.sum, seconds)


def show(rows: list[Row], bytes_per_us: float) -> None:
    table = Table(title=f"One layer's forward; {torch.get_num_threads()} threads read {bytes_per_us / 1e3:.1f} GB/s")
    for column in ("case", "dtype", "page"):
        table.add_column(column)
    for column in ("torch µs", "native µs", "speed-up", "floor µs"):
        table.add_column(column, justify="right")
    for row in rows:
        numbers = (f"{row.torch_us:.0f}", f"{row.native_us:.0f}", f"{row.torch_us / row.native_us:.1f}x")
        table.add_row(row.case, row.dtype, str(row.page_size), *numbers, f"{row.floor_us:.0f}")
    Console(width=120).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the table here, too")
    parser.add_argument("--match", default="", help="only cases whose name, dtype and page size contain this text")
    parser.add_argument("--seconds", type=float, default=0.2, help="time spent on each cell")
    arguments = parser.parse_args()
    bytes_per_us = bandwidth(arguments.seconds)
    wanted = [case for case in cases() if arguments.match in f"{case.name} {case.dtype} {case.page_size}"]
    rows = [measure(case, bytes_per_us, arguments.seconds) for case in wanted]
    show(rows, bytes_per_us)
    if arguments.json is not None:
        result = {
            "threads": torch.get_num_threads(),
            "cpus": os.cpu_count(),
            "torch": torch.__version__,
            "bytes_per_us": bytes_per_us,
            "rows": [asdict(row) for row in rows],
        }
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
