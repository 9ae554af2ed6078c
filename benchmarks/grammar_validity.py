"""Checks that finished outputs meet their grammar, for every backend, on hundreds of generated specifications.

    python benchmarks/grammar_validity.py [--schemas N] [--regexes N] [--backends NAME ...] [--out FILE]

Each JSON schema and each regular expression constrains requests at temperatures 0 and 1.5. The requests go to two
models with the same tokenizer: the bundled model, and a random one, which does not prefer structured text. A finished
output is checked with jsonschema, formats included, or with `re`. An output that reaches the token limit counts as
`length`. Refused specifications are counted too. The exit status is 1 if an output is invalid or a request failed.
"""

import argparse
import asyncio
import json
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import jsonschema

from graftlm import Engine, FinishReason, RequestOutput, SamplingParams
from graftlm.demo import demo_checkpoint
from graftlm.errors import GrammarError
from graftlm.registry import Registry
from graftlm.testing.grammar_specs import generate_regexes, generate_schemas
from graftlm.testing.tiny_models import write_tiny_checkpoint

RESULTS = Path(__file__).parent / "results" / "grammar_validity.json"
MODELS = ("bundled", "random")
TEMPERATURES = (0.0, 1.5)

#: A JSON schema, or the text of a regular expression.
Spec: TypeAlias = dict[str, Any] | str


@dataclass(slots=True)
class Row:
    """The numbers of outcomes for one backend, model and temperature; each specification counts once."""

    backend: str
    whitespace: str
    model: str
    temperature: float
    valid: int = 0
    length: int = 0
    refused: int = 0
    invalid: list[dict[str, Any]] = field(default_factory=list)  # finished outputs that do not meet their specification
    failed: list[dict[str, Any]] = field(default_factory=list)  # requests that failed
    tokens: int = 0
    seconds: float = 0.0

    def count(self, spec: Spec, outcome: RequestOutput | GrammarError) -> None:
        """Count the outcome of a request."""
        if isinstance(outcome, GrammarError):
            self.refused += 1
            return
        self.tokens += len(outcome.token_ids)
        if outcome.finish_reason is FinishReason.LENGTH:
            self.length += 1
        elif outcome.finish_reason is not FinishReason.STOP:
            error = outcome.completions[0].error or ""
            if error.startswith(("json_schema: ", "regex: ")):  # an error of the compilation
                self.refused += 1
            else:
                self.failed.append({"spec": spec, "error": error})
        elif (complaint := complaint_about(spec, outcome.text)) is not None:
            self.invalid.append({"spec": spec, "text": outcome.text, "error": complaint})
        else:
            self.valid += 1


def complaint_about(spec: Spec, text: str) -> str | None:
    """Return the reason why an output violates its specification; None if it does not."""
    if isinstance(spec, str):
        return None if re.fullmatch(spec, text, re.ASCII) else "no match"
    try:
        value = json.loads(text)
        jsonschema.validate(
            value, spec, jsonschema.Draft202012Validator, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
        )
    except (ValueError, jsonschema.ValidationError) as error:
        return str(error).splitlines()[0]
    return None


def write_random_model(directory: Path) -> Path:
    """Write a small random checkpoint with the bundled model's tokenizer."""
    bundled = demo_checkpoint()
    config = json.loads((bundled / "config.json").read_text(encoding="utf-8"))
    write_tiny_checkpoint(
        directory,
        seed=11,
        vocab_size=config["vocab_size"],
        max_position_embeddings=config["max_position_embeddings"],
        eos_token_id=config["eos_token_id"][0],
    )
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        shutil.copy(bundled / name, directory / name)
    return directory


def open_engine(model: Path, backend: str, whitespace: str, num_requests: int) -> Engine:
    """Return an engine that can queue all requests of a row and cache their grammars, with a long time limit."""
    return Engine(
        model=str(model),
        grammar={"name": backend, "options": {"whitespace": whitespace}, "timeout_s": 600, "cache_size": num_requests},
        scheduling={"max_queued_requests": num_requests},
    )


async def ask(engine: Engine, backend: str, spec: Spec, index: int, **sampling: Any) -> RequestOutput | GrammarError:
    """Return the output of one request, or the error if its specification is refused."""
    kind = {"regex": spec} if isinstance(spec, str) else {"json_schema": spec}
    params = SamplingParams(grammar_backend=backend, seed=index, **kind, **sampling)
    try:
        (output,) = await engine.agenerate([f"Write a JSON record for number {index}."], params)
    except GrammarError as error:
        return error
    return output


def measure(engine: Engine, specs: Sequence[Spec], row: Row, max_tokens: int) -> Row:
    """Run all specifications in one batch, and count their outcomes in the row."""

    async def ask_all() -> list[RequestOutput | GrammarError]:
        sampling = {"temperature": row.temperature, "max_tokens": max_tokens}
        return await asyncio.gather(*(ask(engine, row.backend, spec, i, **sampling) for i, spec in enumerate(specs)))

    start = time.perf_counter()
    for spec, outcome in zip(specs, asyncio.run(ask_all()), strict=True):
        row.count(spec, outcome)
    row.seconds = round(time.perf_counter() - start, 2)
    return row


def line(row: Row) -> str:
    """Return a row as a line of the table."""
    num_ended = row.valid + len(row.invalid)
    return (
        f"{row.backend:12} {row.whitespace:9} {row.model:8} {row.temperature:4} {row.valid:5}/{num_ended:<5} "
        f"{row.length:6} {row.refused:7} {len(row.invalid):7} {len(row.failed):6} {row.tokens:7} {row.seconds:6.1f} s"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a table and save it; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schemas", type=int, default=300)
    parser.add_argument("--regexes", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0, help="of the specifications")
    parser.add_argument("--max-tokens", type=int, default=200)
    parser.add_argument("--backends", nargs="+", default=sorted(Registry.load().names("grammar")))
    parser.add_argument("--whitespace", nargs="+", default=["flexible", "spaced"])
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args(arguments)
    specs: list[Spec] = [*generate_schemas(args.schemas, args.seed), *generate_regexes(args.regexes, args.seed)]
    rows: list[Row] = []
    print(
        f"{'backend':12} {'spaces':9} {'model':8} {'temp':4} {'valid/ended':>11} {'length':>6} {'refused':>7} "
        f"{'INVALID':>7} {'FAILED':>6} {'tokens':>7} {'time':>8}"
    )
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        models = dict(zip(MODELS, (demo_checkpoint(), write_random_model(folder / "random")), strict=True))
        for whitespace in args.whitespace:
            for model, path in models.items():
                for backend in args.backends:
                    with open_engine(path, backend, whitespace, len(specs)) as engine:
                        for temperature in TEMPERATURES:
                            row = Row(backend, whitespace, model, temperature)
                            rows.append(measure(engine, specs, row, args.max_tokens))
                            print(line(row), flush=True)
    args.out.parent.mkdir(exist_ok=True)
    report = {"schemas": args.schemas, "regexes": args.regexes, "seed": args.seed, "rows": list(map(asdict, rows))}
    args.out.write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    wrong = [case for row in rows for case in (*row.invalid, *row.failed)]
    for case in wrong[:10]:
        print(json.dumps(case, ensure_ascii=False), file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
