"""Measures decode steps for many context lengths, batch sizes and page sizes: time per token, and KV memory.

    python benchmarks/context_curves.py --model PATH [--kv-tokens N] [--contexts N,N] [--batches N,N]
                                        [--page-sizes N,N] [--repeats N] [--out FILE]

Each point is the median over some steps. A step is timed without the scheduler: the transfer of the batch to the
device, the model, the sampler, and the copy of tokens to the host. Contexts are filled with random keys and values.
Shapes that need more than `--kv-tokens` are left out. A point is a "cliff" if it takes more than 1.3 times the time
that is interpolated linearly between its neighbours on the context axis.
"""

import argparse
import itertools
import json
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from graftlm import EngineConfig
from graftlm.bench.roofline.cases import Case
from graftlm.bench.roofline.rig import longest_context, open_rig

RESULTS = Path(__file__).parent / "results" / "context_curves.json"
CONTEXTS = "128,512,2048,8192,32768"
BATCHES = "1,4,16,64,256"
CLIFF = 1.3


def points(config: EngineConfig, cases: Sequence[Case], repeats: int) -> Iterator[dict[str, Any]]:
    """Time the steps with one page size. Shapes alternate, so that other load on the machine affects all of them."""
    page_size = config.cache.page_size
    with open_rig(config, cases) as rig:
        plans = [rig.plan(case) for case in cases]
        seconds: list[list[float]] = [[] for _ in cases]
        for _ in range(repeats):
            for plan, found in zip(plans, seconds, strict=True):
                found.append(rig.step_s(plan))
        bytes_per_token = rig.kv_bytes_per_token
        for case, found, plan in zip(cases, seconds, plans, strict=True):
            step_s = statistics.median(found)
            yield {
                "page_size": page_size,
                "batch": case.num_requests,
                "context": case.seq_len,
                "step_ms": round(step_s * 1e3, 3),
                "ms_per_token": round(step_s * 1e3 / case.num_requests, 4),
                "kv_mib": round(case.num_pages(page_size) * page_size * bytes_per_token / 2**20, 1),
                "page_table_mib": round(plan.page_table.nbytes / 2**20, 3),
            }


def cliffs(found: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield a description of each cliff: a point far above the line between its neighbours."""
    key = ("page_size", "batch")
    for shape, group in itertools.groupby(
        sorted(found, key=lambda row: (*map(row.get, key), row["context"])), key=lambda row: tuple(map(row.get, key))
    ):
        rows = list(group)
        for before, row, after in zip(rows, rows[1:], rows[2:], strict=False):
            share = (row["context"] - before["context"]) / (after["context"] - before["context"])
            expected = before["step_ms"] + share * (after["step_ms"] - before["step_ms"])
            if row["step_ms"] > CLIFF * expected:
                yield (
                    f"page size {shape[0]}, batch {shape[1]}, context {row['context']:,}: {row['step_ms']:.1f} ms, "
                    f"{row['step_ms'] / expected:.2f} times the line between its neighbours"
                )


def plot(found: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw time per token and memory against the context length, with one line for each batch size and page size."""
    import matplotlib.pyplot as plt

    figure, (times, memory) = plt.subplots(1, 2, figsize=(12, 5))
    styles = dict(zip(sorted({row["page_size"] for row in found}), ("-", "--", ":"), strict=False))
    colors = {batch: f"C{i}" for i, batch in enumerate(sorted({row["batch"] for row in found}))}
    for page_size, (batch, color) in itertools.product(styles, colors.items()):
        rows = [row for row in found if (row["page_size"], row["batch"]) == (page_size, batch)]
        at = [row["context"] for row in rows]
        times.plot(
            at,
            [row["ms_per_token"] for row in rows],
            styles[page_size],
            color=color,
            marker=".",
            label=f"batch {batch}, pages of {page_size}",
        )
        memory.plot(at, [row["kv_mib"] for row in rows], styles[page_size], color=color, marker=".")
    for axes, title in ((times, "milliseconds per token"), (memory, "keys and values, MiB")):
        axes.set(xscale="log", yscale="log", xlabel="context, tokens", title=title)
        axes.grid(alpha=0.3)
    times.legend(fontsize=6, ncols=2)
    figure.savefig(path, bbox_inches="tight")


def main() -> None:
    """Print a table; save the table and a plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--kv-tokens", type=int, default=1 << 18)
    for name, default in (("contexts", CONTEXTS), ("batches", BATCHES), ("page-sizes", "1,16,64")):
        parser.add_argument(f"--{name}", default=default)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    sizes = {
        name: [int(part) for part in getattr(args, name).split(",")] for name in ("contexts", "batches", "page_sizes")
    }
    found: list[dict[str, Any]] = []
    for page_size in sizes["page_sizes"]:
        config = EngineConfig.load(
            {"model": {"path": args.model, "dtype": args.dtype}, "cache": {"page_size": page_size}}
        )
        longest = longest_context(config)
        shapes = itertools.product(sizes["batches"], sizes["contexts"])
        cases = [
            Case("decode", batch, min(context, longest - 1))
            for batch, context in shapes
            if batch * context <= args.kv_tokens
        ]
        for row in points(config, cases, args.repeats):
            found.append(row)
            print("  ".join(f"{name} {value:>9}" for name, value in row.items()), flush=True)
    args.out.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    plot(found, args.out.with_suffix(".svg"))
    print("\n".join(cliffs(found)) or f"no point takes over {CLIFF} times the line between its neighbours")


if __name__ == "__main__":
    main()
