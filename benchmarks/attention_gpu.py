"""Times one attention layer on a CUDA device: `triton`, and `torch_native`, which gathers pages and calls SDPA.

    python benchmarks/attention_gpu.py [--json FILE] [--match TEXT] [--seconds S] [--dtype bfloat16] [--kv-dtype TYPE]

The layer has the shape of an 8B model: H = 32, H_kv = 8, D = 128. Each figure is the median time of a `forward` call,
measured by CUDA events; the L2 cache is flushed before each call. Decode is compared with the bandwidth of a large
copy, prefill with the rate of a large matrix product. Both ceilings are measured in the same run.
"""

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from graftlm.contracts import AttentionBackend, AttentionContext, AttentionLayer, ForwardBatch
from graftlm.execution.kv_store import KVStore
from graftlm.testing.batches import make_batch
from graftlm_attention import TorchNativeOptions, TritonOptions

LAYER = AttentionLayer(layer_id=0, num_heads=32, num_kv_heads=8, head_dim=128, scale=128**-0.5)
DEVICE = torch.device("cuda")
MIN_REPEATS = 10


@dataclass(frozen=True)
class Case:
    """A batch of requests with `context` tokens each; the last `new` tokens are computed."""

    requests: int
    context: int
    new: int
    page_size: int

    @property
    def name(self) -> str:
        """Name of the case in the table."""
        kind = "decode" if self.new == 1 else f"chunk of {self.new}"
        return f"{kind}, B={self.requests}, context {self.context}, page {self.page_size}"

    def num_bytes(self, kv_dtype: torch.dtype) -> int:
        """Size of the keys and values in bytes, each counted once."""
        return self.requests * self.context * KVStore.bytes_per_token([LAYER], kv_dtype)

    @property
    def num_flops(self) -> int:
        """Number of floating-point operations in both matrix products, for the pairs that the causal mask allows."""
        pairs = self.new * (self.context - self.new) + self.new * (self.new + 1) // 2
        return 4 * self.requests * pairs * LAYER.num_heads * LAYER.head_dim


@dataclass(frozen=True)
class Row:
    """One case's times, and the share of the device's ceiling that `triton` reaches."""

    case: str
    torch_us: float | None
    triton_us: float
    rate: float
    unit: str
    share: float


def cases() -> Iterator[Case]:
    for page_size in (1, 16, 64):
        for requests in (1, 16, 64, 256):
            for context in (1024, 8192):
                yield Case(requests, context, 1, page_size)
        yield Case(1, 131072, 1, page_size)
        for new, context in ((512, 512), (4096, 4096), (8192, 8192), (512, 32768)):
            yield Case(1, context, new, page_size)
        yield Case(16, 1024, 512, page_size)


def build(case: Case, dtype: torch.dtype, kv_dtype: torch.dtype) -> tuple[AttentionContext, ForwardBatch]:
    """Return a KV cache of random numbers, and a batch of requests whose pages are scattered over the cache."""
    per_request = -(-case.context // case.page_size)
    num_pages = case.requests * per_request
    pages = torch.randperm(num_pages, generator=torch.Generator().manual_seed(0)).view(case.requests, -1).tolist()
    store = KVStore([LAYER], num_pages, case.page_size, kv_dtype, DEVICE)
    for cache in (store.keys(0), store.values(0)):
        for page in cache.split(4096 // case.page_size):  # in parts: random numbers have a wider type than the cache
            page.copy_(torch.randn(page.shape, device=DEVICE))
    context = AttentionContext([LAYER], store, case.page_size, DEVICE, dtype, case.requests, case.context)
    requests = [([0] * case.new, case.context - case.new)] * case.requests
    return context, make_batch(requests, pages, case.page_size, device=DEVICE)


def median_us(call: Callable[[], object], seconds: float) -> float:
    """Return a call's median time on the device, in microseconds; the L2 cache is flushed before each call."""
    rubbish = torch.empty(256 * 2**20, dtype=torch.int8, device=DEVICE)
    call()
    times: list[float] = []
    while len(times) < MIN_REPEATS or sum(times) < seconds * 1e6:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        rubbish.zero_()  # flushes the L2 cache, and keeps the device busy until the call is launched
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return statistics.median(times)


def create(name: str, context: AttentionContext) -> AttentionBackend:
    from graftlm_attention.torch_native import create_torch_native
    from graftlm_attention.triton_paged import TritonPagedAttention

    if name == "triton":
        return TritonPagedAttention(TritonOptions(), context)
    return create_torch_native(TorchNativeOptions(kernel="torch"), context)


def measure(
    case: Case, dtype: torch.dtype, kv_dtype: torch.dtype, bytes_per_us: float, flops_per_us: float, seconds: float
) -> Row:
    context, batch = build(case, dtype, kv_dtype)
    q = torch.randn(batch.num_tokens, LAYER.num_heads, LAYER.head_dim, device=DEVICE).to(dtype)
    k, v = torch.randn(2, batch.num_tokens, LAYER.num_kv_heads, LAYER.head_dim, device=DEVICE).to(dtype)
    times: dict[str, float] = {}
    for name in ("torch", "triton") if kv_dtype == dtype else ("triton",):
        backend = create(name, context)
        backend.prepare(batch)
        times[name] = median_us(lambda b=backend: b.forward(q, k, v, LAYER), seconds)  # type: ignore[misc]
    if case.new == 1:
        rate, unit, ceiling = case.num_bytes(kv_dtype) / times["triton"] / 1e3, "GB/s", bytes_per_us / 1e3
    else:
        rate, unit, ceiling = case.num_flops / times["triton"] / 1e6, "TFLOP/s", flops_per_us / 1e6
    return Row(case.name, times.get("torch"), times["triton"], rate, unit, rate / ceiling)


def copy_bandwidth(seconds: float) -> float:
    """Return the bandwidth of a large copy in bytes per microsecond; reads and writes both count."""
    source = torch.ones(2**30, dtype=torch.int8, device=DEVICE)
    target = torch.empty_like(source)
    return 2 * source.nbytes / median_us(lambda: target.copy_(source), seconds)


def matrix_rate(dtype: torch.dtype, seconds: float) -> float:
    """Return the rate of a large matrix product in floating-point operations per microsecond."""
    a, b = torch.randn(2, 8192, 8192, device=DEVICE).to(dtype)
    return float(2 * 8192**3 / median_us(lambda: a @ b, seconds))


def show(rows: list[Row], title: str) -> None:
    table = Table(title=title)
    table.add_column("case")
    for column in ("SDPA µs", "triton µs", "speed-up", "triton", "of ceiling"):
        table.add_column(column, justify="right")
    for row in rows:
        sdpa = ("-", "-") if row.torch_us is None else (f"{row.torch_us:.0f}", f"{row.torch_us / row.triton_us:.1f}x")
        rate = f"{row.rate:.0f} {row.unit}"
        table.add_row(row.case, sdpa[0], f"{row.triton_us:.0f}", sdpa[1], rate, f"{row.share:.0%}")
    Console(width=120).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the table here, too")
    parser.add_argument("--match", default="", help="only cases whose name contains this text")
    parser.add_argument("--seconds", type=float, default=0.2, help="device time spent on each cell")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--kv-dtype", choices=("float8_e4m3fn",), help="of the cache; left out: as --dtype")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(1, "This benchmark measures a CUDA device, and torch finds none. On a CPU: attention_decode.py.\n")
    dtype = getattr(torch, arguments.dtype)
    kv_dtype = getattr(torch, arguments.kv_dtype or arguments.dtype)
    bytes_per_us, flops_per_us = copy_bandwidth(arguments.seconds), matrix_rate(dtype, arguments.seconds)
    wanted = [case for case in cases() if arguments.match in case.name]
    rows = [measure(case, dtype, kv_dtype, bytes_per_us, flops_per_us, arguments.seconds) for case in wanted]
    name = torch.cuda.get_device_name()
    ceilings = f"copies at {bytes_per_us / 1e3:.0f} GB/s, multiplies at {flops_per_us / 1e6:.0f} TFLOP/s"
    show(rows, f"One layer's forward, {arguments.dtype}, cache {kv_dtype}; {name} {ceilings}")
    if arguments.json is not None:
        result = {
            "device": name,
            "torch": torch.__version__,
            "bytes_per_us": bytes_per_us,
            "flops_per_us": flops_per_us,
            "rows": [asdict(row) for row in rows],
        }
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
