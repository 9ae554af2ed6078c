"""Measures how many forward passes and how much time jump-forward saves, and how often it changes the text.

    python benchmarks/jump_forward.py [--runs N] [--out FILE]
    python benchmarks/jump_forward.py --fidelity 200 [--whitespace spaced]

The bundled model generates two outputs. The first is the paper's example, a summary and a grade, with a regular
expression. The second is a record of twenty keys, with a JSON schema and each style of whitespace. Runs with
jump-forward off, fast and exact alternate.

With --fidelity, only the number of changed texts is measured. Greedy requests with generated schemas and regular
expressions run with fast jump-forward, with `jump_forward=False`, and with exact jump-forward. Their texts are compared
with the texts of an engine without jump-forward. Only fast jump-forward may change texts; otherwise the exit status is
1.
"""

import argparse
import json
import statistics
import sys
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from graftlm import Engine, FinishReason, RequestOutput, SamplingParams
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


Mode: TypeAlias = Literal["off", "fast", "exact"]
MODES: tuple[Mode, ...] = ("off", "fast", "exact")


@dataclass(frozen=True, slots=True)
class Row:
    """The medians over one case's runs, for each mode; `faster` is the time of "off" divided by the mode's time."""

    case: str
    overlap: bool
    batch: int
    passes: dict[Mode, float]
    faster: dict[Mode, float]
    forced_share: float


def engine(whitespace: str, mode: Mode, overlap: bool) -> Engine:
    """Return an engine with the bundled model."""
    jump_forward = False if mode == "off" else mode
    return Engine(
        model="demo",
        grammar={"name": "xgrammar", "options": {"whitespace": whitespace}, "jump_forward": jump_forward},
        scheduling={"overlap": overlap},
    )


def measure(case: str, overlap: bool, batch: int, num_runs: int) -> Row:
    """Run a case in each mode; the modes alternate."""
    whitespace, grammar = CASES[case]
    passes: dict[Mode, list[int]] = {mode: [] for mode in MODES}
    seconds: dict[Mode, list[float]] = {mode: [] for mode in MODES}
    forced = tokens = 0
    with ExitStack() as stack:
        engines = {mode: stack.enter_context(engine(whitespace, mode, overlap)) for mode in MODES}
        for run in range(num_runs + 2):  # the first runs compile
            prompts = [f"Report {run}.{i}: the values are" for i in range(batch)]
            params = [
                SamplingParams(temperature=1.0, seed=run * batch + i, max_tokens=600, **grammar) for i in range(batch)
            ]
            for mode, one in engines.items():
                before, start = one.stats(), time.perf_counter()
                outputs = one.generate(prompts, params)
                taken, after = time.perf_counter() - start, one.stats()
                if run < 2:
                    continue
                num_tokens = sum(output.usage.completion_tokens for output in outputs)
                seconds[mode].append(taken / num_tokens)
                passes[mode].append(after.steps - before.steps)
                if mode == "fast":
                    forced += after.jump_forward_tokens - before.jump_forward_tokens
                    tokens += num_tokens
    return Row(
        case=case,
        overlap=overlap,
        batch=batch,
        passes={mode: statistics.median(values) for mode, values in passes.items()},
        faster={
            mode: round(statistics.median(seconds["off"]) / statistics.median(values), 2)
            for mode, values in seconds.items()
        },
        forced_share=round(forced / tokens, 2),
    )


@dataclass(frozen=True, slots=True)
class Fidelity:
    """The numbers of greedy texts that differ from those of an engine without jump-forward.

    Attributes:
        fast: number of changed texts with `jump_forward: fast`.
        fast_with_logprobs: the same with log-probabilities, which switch jump-forward off.
        switched_off: number with `jump_forward=False`, without and with log-probabilities.
        exact: number with `jump_forward: exact`, without and with log-probabilities.
    """

    num_cases: int
    num_forced: int
    fast: int
    fast_with_logprobs: int
    switched_off: int
    exact: int


def measure_fidelity(num_cases: int, whitespace: str, max_tokens: int = 160) -> Fidelity:
    """Compare greedy texts with and without jump-forward; two thirds of the requests have a schema."""
    num_regexes = num_cases // 3
    grammars: list[dict[str, Any]] = [{"json_schema": one} for one in generate_schemas(num_cases - num_regexes, seed=7)]
    grammars += [{"regex": one} for one in generate_regexes(num_regexes, seed=7)]

    def outputs_of(one: Engine, **more: Any) -> list[RequestOutput]:
        params = [SamplingParams(temperature=0, max_tokens=max_tokens, strict=False, **g, **more) for g in grammars]
        return one.generate(prompts, params)

    def is_enforced(one: Engine, grammar: dict[str, Any]) -> bool:
        try:
            (output,) = one.generate("x", SamplingParams(max_tokens=1, strict=False, **grammar))
        except GrammarError:
            return False
        return output.finish_reason is not FinishReason.ERROR

    with (
        engine(whitespace, "off", False) as off,
        engine(whitespace, "fast", False) as fast,
        engine(whitespace, "exact", False) as exact,
    ):
        grammars = [one for one in grammars if is_enforced(off, one)]
        prompts = [f"Write record {i}:" for i in range(len(grammars))]
        expected = [output.text for output in outputs_of(off)]

        def num_other(one: Engine, **more: Any) -> int:
            return sum(output.text != text for output, text in zip(outputs_of(one, **more), expected, strict=True))

        return Fidelity(
            num_cases=len(grammars),
            num_forced=sum(output.usage.jump_forward_tokens > 0 for output in outputs_of(fast)),
            fast=num_other(fast),
            fast_with_logprobs=num_other(fast, logprobs=0),
            switched_off=num_other(fast, jump_forward=False) + num_other(fast, jump_forward=False, logprobs=0),
            exact=num_other(exact) + num_other(exact, logprobs=0),
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
            f"alone: {found.fast} with fast jump-forward, {found.fast_with_logprobs} with log-probabilities, "
            f"{found.switched_off} with jump_forward=False, {found.exact} with exact jump-forward"
        )
        return 1 if found.fast_with_logprobs or found.switched_off or found.exact else 0
    rows = []
    print(f"{'case':28} {'overlap':>7} {'batch':>5} {'passes: off':>12} {'fast':>5} {'exact':>5}   faster: fast  exact")
    for case in CASES:
        for overlap in (False, True):
            for batch in (1, 16):
                row = measure(case, overlap, batch, args.runs)
                rows.append(row)
                passes, faster = row.passes, row.faster
                print(
                    f"{row.case:28} {row.overlap!s:>7} {row.batch:5} {passes['off']:12.0f} {passes['fast']:5.0f} "
                    f"{passes['exact']:5.0f}   {faster['fast']:11.2f}x {faster['exact']:5.2f}x",
                    flush=True,
                )
    args.out.parent.mkdir(exist_ok=True)
    args.out.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
