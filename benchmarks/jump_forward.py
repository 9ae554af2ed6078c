"""Measures how many forward passes jump-forward saves, how much time, and how often it changes the text.

    python benchmarks/jump_forward.py [--runs N] [--out FILE]
    python benchmarks/jump_forward.py --fidelity 200 [--whitespace spaced]

Two outputs on the bundled model: the paper's example, a summary and a grade, as a regular expression; and a record of
twenty keys as a JSON schema, with each way of writing whitespace. Jump-forward on and off alternate in one run.

With --fidelity only that is measured: of so many greedy requests under generated schemas and regular expressions, how
many texts differ from those that masks alone give, and how many with `jump_forward=False`, with and without
log-probabilities. The exit status is 1 if any of the latter differ.
"""

import argparse
import json
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from graftlm import Engine, FinishReason, SamplingParams
from graftlm.errors import GrammarError
from graftlm.testing.grammar_specs import generate_regexes, generate_schemas

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


@dataclass(frozen=True, slots=True)
class Fidelity:
    """Greedy texts that differ from those of an engine without jump-forward.

    Attributes:
        with_jumps: where jump-forward is on.
        with_logprobs: where it is on and log-probabilities are asked for, which switches it off.
        switched_off: with `jump_forward=False`, and with that and log-probabilities.
    """

    num_cases: int
    num_forced: int
    with_jumps: int
    with_logprobs: int
    switched_off: int


def measure_fidelity(num_cases: int, whitespace: str, max_tokens: int = 160) -> Fidelity:
    """Compare greedy texts with and without jump-forward; of the requests, two in three have a schema."""
    num_regexes = num_cases // 3
    grammars: list[dict[str, Any]] = [{"json_schema": one} for one in generate_schemas(num_cases - num_regexes, seed=7)]
    grammars += [{"regex": one} for one in generate_regexes(num_regexes, seed=7)]

    def texts(one: Engine, **more: Any) -> list[tuple[str, int]]:
        params = [SamplingParams(temperature=0, max_tokens=max_tokens, strict=False, **g, **more) for g in grammars]
        outputs = one.generate(prompts, params)
        return [(output.text, output.usage.jump_forward_tokens) for output in outputs]

    def is_enforced(one: Engine, grammar: dict[str, Any]) -> bool:
        try:
            (output,) = one.generate("x", SamplingParams(max_tokens=1, strict=False, **grammar))
        except GrammarError:
            return False
        return output.finish_reason is not FinishReason.ERROR

    with engine(whitespace, False, False) as off, engine(whitespace, True, False) as on:
        grammars = [one for one in grammars if is_enforced(off, one)]
        prompts = [f"Write record {i}:" for i in range(len(grammars))]
        expected = [text for text, _ in texts(off)]

        def num_other(**more: Any) -> int:
            return sum(text != other for (text, _), other in zip(texts(on, **more), expected, strict=True))

        return Fidelity(
            num_cases=len(grammars),
            num_forced=sum(num > 0 for _, num in texts(on)),
            with_jumps=num_other(),
            with_logprobs=num_other(logprobs=0),
            switched_off=num_other(jump_forward=False) + num_other(jump_forward=False, logprobs=0),
        )


def main() -> int:
    """Print a table and save it; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--fidelity", type=int, metavar="N", help="compare N greedy texts instead")
    parser.add_argument("--whitespace", default="flexible", help="of the JSON that is compared")
    args = parser.parse_args()
    if args.fidelity:
        found = measure_fidelity(args.fidelity, args.whitespace)
        print(
            f"{found.num_cases} greedy requests, {found.num_forced} with forced tokens. Other text than with masks "
            f"alone: {found.with_jumps} with jump-forward, {found.with_logprobs} with log-probabilities, "
            f"{found.switched_off} with jump_forward=False"
        )
        return 1 if found.with_logprobs or found.switched_off else 0
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
    return 0


if __name__ == "__main__":
    sys.exit(main())
