"""Checks graftlm on a CUDA device: its tests, its kernels, and its speed compared with the device's ceilings.

    python benchmarks/gpu_check.py [--shape 8b] [--context 1024] [--budget-s 900] [--only PART ...] [--json FILE]

The parts are independent of each other:

    tests      the tests that are marked `gpu`
    kernels    attention of every backend against the reference in float32
    steps      decode of 1, 16, 64, 256 requests and prefill of 512, 4,096 tokens; graphs on and off; with every
               backend that can run: triton, torch_native (SDPA), and flashinfer if it is installed
    sampling   top-k and top-p of 1, 16, 64, 256 rows, compared with a sort of the same rows
    serving    the whole engine with overlap and graphs on and off: tokens per second, and the device's idle time

Times are measured by events on the device. The same run measures the ceilings: memory bandwidth and the rate of matrix
products. The checkpoint is a sparse file that takes no disk space; random weights are generated on the device.
"""

import argparse
import gc
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from graftlm import EngineConfig, SamplingParams
from graftlm.assembly.assemble import assemble
from graftlm.assembly.device_parts import DeviceParts
from graftlm.assembly.engine_parts import EngineParts
from graftlm.assembly.target import detect_platform
from graftlm.bench.roofline import Case, Ceilings, Effort
from graftlm.bench.roofline.ceilings import CeilingProbe
from graftlm.bench.roofline.clock import clock_for
from graftlm.bench.roofline.cost import Cost
from graftlm.bench.roofline.rig import Rig
from graftlm.contracts import AttentionLayer, Platform
from graftlm.execution.runner import ModelRunner
from graftlm.execution.sampling_filters import keep_top_k, keep_top_p
from graftlm.registry import Registry
from graftlm.testing.attention_scene import AttentionScene
from graftlm.testing.reference_attention import ReferenceAttention
from graftlm.testing.sparse_checkpoint import LlamaShape, write_sparse_checkpoint
from graftlm_attention import provide_attention_backends

ROOT = Path(__file__).parents[1]
MIN_STEPS = 5
#: Tolerance for bfloat16 attention: the softmax weights and the result are rounded.
TOLERANCE = 0.03

Row = dict[str, Any]


SHAPES = {
    "8b": LlamaShape(4096, 14336, 32, 32, 8, 128, 128256),
    "1b": LlamaShape(2048, 8192, 16, 32, 8, 64, 128256),
    "tiny": LlamaShape(64, 96, 2, 4, 2, 16, 4096),
}


@dataclass
class Bench:
    """The state that the parts share.

    Attributes:
        end_s: time limit, as a value of the monotonic clock in seconds.
        notes: the parts that were left out, with reasons.
    """

    device: torch.device
    shape: LlamaShape
    context: int
    end_s: float
    folder: Path
    batches: tuple[int, ...] = (1, 16, 64, 256)
    prefills: tuple[int, ...] = (512, 4096)
    effort: Effort | None = None
    turn_s: float = 0.5
    notes: list[str] = field(default_factory=list)

    @property
    def left_s(self) -> float:
        return self.end_s - time.monotonic()

    def has_time(self, what: str) -> bool:
        if self.left_s <= 0:
            self.notes.append(f"{what}: left out, the time is over (--budget-s)")
        return self.left_s > 0

    @property
    def backends(self) -> tuple[str, ...]:
        """Return the attention backends that support this shape on this device; the first one is selected by `auto`."""
        platform = Platform(self.device.type, _capability(self.device))
        return tuple([
            provider.name
            for provider in sorted(provide_attention_backends(), key=lambda provider: -provider.rank)
            if (provider.unavailable is None or provider.unavailable(platform) is None)
            and self.shape.head_dim in (provider.capabilities.head_dims or (self.shape.head_dim,))
        ])  # fmt: skip

    def cases(self) -> list[Case]:
        """Return the cases whose keys and values fit into the device's memory together with the weights."""
        cases = [Case("decode", batch, self.context) for batch in self.batches]
        cases += [Case("prefill", 1, length) for length in self.prefills]
        if self.device.type != "cuda":
            return cases
        free = torch.cuda.mem_get_info(self.device)[0]
        most = int(0.8 * (free - self.shape.weight_bytes)) // self.shape.kv_bytes_per_token
        large = [case for case in cases if case.num_requests * case.seq_len > most]
        self.notes += [f"{case}: left out, the device has memory for {max(0, most):,} tokens" for case in large]
        return [case for case in cases if case not in large]

    def assembled(self, attention: str, kv_tokens: int, **sections: Any) -> EngineParts:
        """Return the parts of an engine with random weights."""
        config = EngineConfig.load(
            {
                "model": {"path": str(self.folder), "device": self.device.type, "prepack": False},
                "attention": attention,
                "cache": {"name": "chunk", "page_size": 16},
                "memory": {"kv_tokens": kv_tokens},
                "execution": {"graphs": "auto" if self.device.type == "cuda" else True},
            },
            **sections,
        )
        platform = detect_platform(config)
        parts = assemble(config, Registry.load(config.plugins, (), platform), platform)
        model = parts.device_parts.model
        for parameter in model.parameters() if isinstance(model, torch.nn.Module) else ():
            parameter.fill_(1.0) if parameter.dim() == 1 else parameter.normal_(0.0, 0.02)
        return parts


# -- the parts ---------------------------------------------------------------------------------------------------------


def run_tests(bench: Bench) -> list[Row]:
    """Run the tests that need a device."""
    command = [sys.executable, "-m", "pytest", "--full", "-m", "gpu", "-p", "no:cacheprovider", str(ROOT / "tests")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=bench.left_s, check=False)
    lines = (done.stdout + done.stderr).strip().splitlines()
    if done.returncode != 0:
        raise RuntimeError("\n".join(lines[-40:]))
    return [{"pytest": lines[-1]}]


def check_kernels(bench: Bench) -> list[Row]:
    """Compare every backend's attention of a mixed batch with the reference, with the head counts of the shape."""
    shape, rows = bench.shape, []
    providers = {provider.name: provider for provider in provide_attention_backends()}
    layer = AttentionLayer(0, shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.head_dim**-0.5)
    requests = [(900, 1), (17, 1), (0, 1), (64, 130), (0, 300)]
    for page_size in (1, 16, 64):
        scene = AttentionScene.draw(requests, [layer], page_size=page_size, dtype=torch.bfloat16, device=bench.device)
        expected = scene.run(ReferenceAttention).outputs[0].float()
        for name in bench.backends:
            provider = providers[name]
            if page_size not in (provider.capabilities.page_sizes or (page_size,)):
                continue
            out = scene.run(lambda context, p=provider: p.create(p.options(), context)).outputs[0].float()
            error = float((out - expected).abs().max())
            rows.append({"backend": name, "page size": page_size, "largest error": f"{error:.4f}"})
            if not error <= TOLERANCE:
                raise RuntimeError(f"{name}, page size {page_size}: off by {error:.3g}, expected at most {TOLERANCE}")
    return rows


def measure_steps(bench: Bench) -> list[Row]:
    """Time single steps with every backend, with and without graphs, and compare them with the ceilings."""
    ceilings = _ceilings(bench)
    rows: list[Row] = []
    cases = bench.cases()
    if not cases:
        raise RuntimeError("the device has no memory for any step; take a smaller --shape or --context")
    kv_tokens = max(case.num_pages(16) for case in cases) * 16
    for name in bench.backends:
        if not bench.has_time(f"steps by {name}"):
            break
        scheduling = {"max_running_requests": max(bench.batches), "overlap": False}
        parts = bench.assembled(name, kv_tokens, scheduling=scheduling)
        for graphs, device_parts in _with_and_without_graphs(parts, bench.device):
            rig = Rig(device_parts, 16, bench.shape.vocab_size)
            for case in cases:
                if graphs and case.kind == "prefill":
                    continue  # graphs are only captured for decode steps
                if bench.has_time(f"{case} by {name}, graphs {graphs}"):
                    rows.append(_step_row(bench, rig, device_parts, case, ceilings, name, graphs))
        parts.loop.close()
        del parts, device_parts, rig
        _free()
    return rows


def _ceilings(bench: Bench) -> Ceilings:
    effort = bench.effort or Effort.for_device(bench.device, rounds=5)
    probe = CeilingProbe(bench.device, torch.bfloat16, clock_for(bench.device), effort)
    for _ in range(effort.rounds):
        probe.sample()
    ceilings = probe.ceilings()
    bench.notes.append(
        f"ceilings: reads {ceilings.read_bytes_per_s / 1e9:,.0f} GB/s, "
        f"multiplies {ceilings.matrix_flops_per_s / 1e12:,.1f} TFLOP/s in bfloat16"
    )
    del probe
    _free()
    return ceilings


def _with_and_without_graphs(parts: EngineParts, device: torch.device) -> Iterator[tuple[bool, DeviceParts]]:
    have = parts.device_parts
    if have.graphs is not None:
        yield True, have
    num_rows = parts.config.scheduling.max_running_requests
    eager = ModelRunner(have.model, have.attention, have.sampler, num_rows, device)
    yield False, replace(have, runner=eager, graphs=None)


def _step_row(
    bench: Bench, rig: Rig, parts: DeviceParts, case: Case, ceilings: Ceilings, name: str, graphs: bool
) -> Row:
    plan = rig.plan(case)
    times: list[float] = []
    end = time.monotonic() + min(bench.turn_s, bench.left_s)
    while len(times) < MIN_STEPS or time.monotonic() < end:
        times.append(parts.runner.run(plan).model_s)
    step_s = statistics.median(times)
    cost = sum(rig.costs(plan).values(), Cost())
    num_bytes = cost.weight_bytes + cost.kv_bytes
    return {
        "step": str(case),
        "backend": name,
        "graphs": graphs,
        "ms": round(1e3 * step_s, 3),
        "tokens/s": round(plan.num_tokens / step_s),
        "of bandwidth": round(num_bytes / step_s / ceilings.read_bytes_per_s, 3),
        "of matrix rate": round(cost.flops / step_s / ceilings.matrix_flops_per_s, 3),
    }


def measure_sampling(bench: Bench) -> list[Row]:
    """Time the top-k and top-p filters for every batch size, and compare them with a sort of the same rows."""
    rows: list[Row] = []
    for batch in bench.batches:
        logits = torch.randn(batch, bench.shape.vocab_size, device=bench.device) * 4
        probs, k, p = logits.softmax(dim=1), np.full(batch, 50), np.full(batch, 0.9)
        row: Row = {"rows": batch}
        ways = {
            "top-k ms": partial(keep_top_k, logits, k),
            "top-p ms": partial(keep_top_p, probs, p),
            "sort ms": partial(torch.sort, probs, dim=1, descending=True),
        }
        for name, way in ways.items():
            row[name] = round(1e3 * _median_s(bench, way), 3)
        rows.append(row)
    return rows


def _median_s(bench: Bench, function: Callable[[], object]) -> float:
    """Return the median time of a few calls on the device, in seconds; one untimed call compiles the kernels first."""
    clock = clock_for(bench.device)
    function()
    marks = [(clock.mark(), function(), clock.mark()) for _ in range(MIN_STEPS)]
    clock.sync()
    return statistics.median(clock.seconds(start, end) for start, _, end in marks)


def measure_serving(bench: Bench) -> list[Row]:
    """Run 64 requests through the whole engine, with overlap and graphs on and off."""
    rows: list[Row] = []
    count, prompt_len, num_tokens = min(64, max(bench.batches)), 64, 64
    for overlap in (True, False):
        for graphs in (True, False):
            what = f"overlap {overlap}, graphs {graphs}"
            if not bench.has_time(what):
                continue
            parts = bench.assembled(
                bench.backends[0],
                kv_tokens=2 * count * (prompt_len + num_tokens),
                scheduling={"max_running_requests": count, "overlap": overlap},
                execution={"graphs": graphs},
            )
            _serve(parts, count, prompt_len, 4)  # compiles and chooses the kernels
            before, start = parts.loop.stats().model_s, time.perf_counter()
            _serve(parts, count, prompt_len, num_tokens)
            wall_s, busy_s = time.perf_counter() - start, parts.loop.stats().model_s - before
            rows.append({
                "overlap": overlap,
                "graphs": graphs,
                "s": round(wall_s, 3),
                "tokens/s": round(count * num_tokens / wall_s),
                "device idle": round(1 - busy_s / wall_s, 4),
            })  # fmt: skip
            parts.loop.close()
            del parts
            _free()
    return rows


def _serve(parts: EngineParts, count: int, prompt_len: int, num_tokens: int) -> None:
    rng = np.random.default_rng(0)
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    for i in range(count):
        prompt = parts.intake.check_prompt(rng.integers(1, 4000, prompt_len).tolist())
        parts.loop.scheduler.add(parts.intake.request(str(i), prompt, params))
    while parts.loop.scheduler.has_work:
        parts.loop.step()


def _capability(device: torch.device) -> tuple[int, int] | None:
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


def _free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


PARTS: dict[str, Callable[[Bench], list[Row]]] = {
    "tests": run_tests,
    "kernels": check_kernels,
    "steps": measure_steps,
    "sampling": measure_sampling,
    "serving": measure_serving,
}


def run_part(name: str, bench: Bench) -> dict[str, Any]:
    """Run a part and return its report; if the part fails, return the error, so that the next part can run."""
    start, bench.notes = time.monotonic(), []
    result: dict[str, Any] = {"part": name, "rows": [], "error": None}
    try:
        if bench.has_time(name):
            result["rows"] = PARTS[name](bench)
    except Exception as error:
        result["error"] = f"{type(error).__name__}: {error}"
    _free()
    return {**result, "notes": bench.notes, "seconds": round(time.monotonic() - start, 1)}


def show(result: dict[str, Any], console: Console) -> None:
    rows: Sequence[Row] = result["rows"]
    table = Table(title=f"{result['part']} ({result['seconds']} s)")
    for column in rows[0] if rows else ():
        table.add_column(column)
    for row in rows:
        table.add_row(*[str(value) for value in row.values()])
    if rows:
        console.print(table)
    for note in result["notes"]:
        console.print(note, markup=False)
    if result["error"] is not None:
        console.print(f"{result['part']} failed: {result['error']}", markup=False)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="8b", help="of the random model")
    parser.add_argument("--context", type=int, default=1024, help="tokens of each decoding request")
    parser.add_argument("--budget-s", type=float, default=900.0, help="no measurement starts after so many seconds")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="parts to run")
    parser.add_argument("--json", type=Path, default=ROOT / "benchmarks" / "results" / "gpu_check.json")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.exit(1, "gpu-check needs a CUDA device, and torch finds none. Install a CUDA build of torch.\n")
    with tempfile.TemporaryDirectory() as folder:
        write_sparse_checkpoint(Path(folder), SHAPES[options.shape])
        bench = Bench(
            torch.device("cuda"),
            SHAPES[options.shape],
            options.context,
            time.monotonic() + options.budget_s,
            Path(folder),
        )
        results, console = [], Console(width=120)
        for name in options.only:
            results.append(run_part(name, bench))
            show(results[-1], console)
    versions = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "cuda": torch.version.cuda}
    options.json.write_text(json.dumps({**versions, "shape": options.shape, "parts": results}, indent=1) + "\n")
    failed = [result["part"] for result in results if result["error"] is not None]
    if failed:
        parser.exit(1, f"failed: {', '.join(failed)}\n")


if __name__ == "__main__":
    main()
