"""Measures how many forward passes jump-forward saves, and how much time.

    python benchmarks/jump_forward.py [--runs N] [--out FILE]

Two outputs on the bundled model: the paper's example, a summary and a grade, as a regular expression; and a record of
twenty keys as a JSON schema, with each way of writing whitespace. Jump-forward on and off alternate in one run.
"""

import argparse
import json
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from graftlm import Engine, SamplingParams

RESULTS = Path(__file__).parent / "results" / "jump_forward.json"
SUMMARY = r'\{"summary": "[A-Za-z ,]{20,60}", "grade": "[ABCD][+\-]?"\}'
RECORD = {
    "type": "object",
    "properties": {f"measurement_{i:02}": {"type": "integer", "minimum": 0, "maximum": 99} for i in range(20)},
    "required": [f"measurement_{i:02}" for i in range(20)],
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "summary and grade (regex)": ("flexible", {"regex": SUMMARY}),
    "20-key record, spaced": ("spaced", {"json_schema": RECORD}),
    "20-key record, compact": ("compact", {"json_schema": RECORD}),
    "20-key record, flexible": ("flexible", {"json_schema": RECORD}),
}


@dataclass(frozen=True, slots=True)
class Row:
    """One case: medians over the runs."""

    case: str
    overlap: bool
    batch: int
    passes_off: float
    passes_on: float
    passes_ratio: float
    seconds_ratio: float
    forced_share: float


def engine(whitespace: str, jump_forward: bool, overlap: bool) -> Engine:
    """Return an engine on the bundled model."""
    return Engine(
        model="demo",
        grammar={"name": "xgrammar", "options": {"whitespace": whitespace}, "jump_forward": jump_forward},
        scheduling={"overlap": overlap},
    )


def measure(case: str, overlap: bool, batch: int, num_runs: int) -> Row:
    """Run a case with jump-forward off and on, in turns."""
    whitespace, grammar = CASES[case]
    passes: dict[bool, list[int]] = {False: [], True: []}
    seconds: dict[bool, list[float]] = {False: [], True: []}
    forced = tokens = 0
    with engine(whitespace, False, overlap) as off, engine(whitespace, True, overlap) as on:
        for run in range(num_runs + 1):  # the first one compiles
            prompts = [f"Report {run}.{i}: the values are" for i in range(batch)]
            params = [
                SamplingParams(temperature=1.0, seed=run * batch + i, max_tokens=600, **grammar) for i in range(batch)
            ]
            for is_on, one in ((False, off), (True, on)):
                before, start = one.stats(), time.perf_counter()
                one.generate(prompts, params)
                after = one.stats()
                if run:
                    seconds[is_on].append(time.perf_counter() - start)
                    passes[is_on].append(after.steps - before.steps)
                    forced += after.jump_forward_tokens - before.jump_forward_tokens
                    tokens += (after.generated_tokens - before.generated_tokens) * is_on
    medians = {is_on: statistics.median(values) for is_on, values in passes.items()}
    return Row(
        case=case,
        overlap=overlap,
        batch=batch,
        passes_off=medians[False],
        passes_on=medians[True],
        passes_ratio=round(medians[False] / medians[True], 2),
        seconds_ratio=round(statistics.median(seconds[False]) / statistics.median(seconds[True]), 2),
        forced_share=round(forced / tokens, 2),
    )


def main() -> None:
    """Print a table and save it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    rows = []
    print(
        f"{'case':28} {'overlap':>7} {'batch':>5} {'passes off':>10} {'on':>6} {'fewer':>6} {'faster':>7} {'forced':>7}"
    )
    for case in CASES:
        for overlap in (False, True):
            for batch in (1, 16):
                row = measure(case, overlap, batch, args.runs)
                rows.append(row)
                print(
                    f"{row.case:28} {row.overlap!s:>7} {row.batch:5} {row.passes_off:10.0f} {row.passes_on:6.0f} "
                    f"{row.passes_ratio:5.2f}x {row.seconds_ratio:6.2f}x {row.forced_share:7.0%}",
                    flush=True,
                )
    args.out.parent.mkdir(exist_ok=True)
    args.out.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
