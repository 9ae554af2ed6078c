"""Looks for disagreement between a grammar backend's masks and its `accept`, and for invalid outputs.

    python benchmarks/grammar_walks.py [--specs N] [--seed N] [--vocab 2000 32000 128000] [--backends NAME ...]

Specifications of all kinds (JSON schemas, regular expressions, EBNF, structural tags, choices) are generated and
compiled for vocabularies of several sizes. In each step of a random walk, the matcher accepts a token that the mask
allows; other tokens are tried too. These are disagreements:

- a token that the mask allows and `accept` rejects, or that the mask forbids and `accept` accepts;
- a mask that allows nothing before the end;
- forced tokens or text that a mask forbids;
- a finished output that does not meet its specification, judged by jsonschema, `regex` or the grammar's recogniser.

Refused specifications are counted. A walk counts as `limits` if the backend raises GrammarError because the text has
too many parses. `--vocab 2000` selects the bundled model's vocabulary (2,048 tokens); larger ones are generated.

The exit status is 1 if there is a disagreement.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import regex
import tokenizers
from grammar_judges import Judge, choice_judge, schema_judge, tag_judge

from graftlm.checkpoint import load_model_config
from graftlm.config import EngineConfig
from graftlm.contracts import GrammarBackend, GrammarContext, GrammarKind, GrammarSpec
from graftlm.demo import demo_checkpoint
from graftlm.errors import GrammarError
from graftlm.registry import Registry
from graftlm.testing.ebnf_specs import generate_ebnfs
from graftlm.testing.grammar_specs import generate_specs
from graftlm.testing.grammar_walks import Walk, Walker
from graftlm.testing.vocabularies import END_TOKEN, generate_tokenizer
from graftlm.tokenization import Tokenizer

DEMO_SIZE = 2048
MAX_JUDGE_S = 2.0
LENGTHS = (40, 120, 360)


@dataclass(slots=True)
class Row:
    """The numbers of outcomes for one backend and vocabulary."""

    backend: str
    vocab_size: int
    specs: int = 0
    refused: int = 0
    walks: int = 0
    finished: int = 0
    limits: int = 0  # walks that end with a GrammarError, because the text has too many parses
    tokens: int = 0
    seconds: float = 0.0
    compile_s: float = 0.0
    reasons: dict[str, int] = field(default_factory=dict)  # kind of refusal -> number of refusals
    disagreements: list[dict[str, Any]] = field(default_factory=list)


def vocabulary(size: int) -> tuple[GrammarContext, Walker]:
    """Return a grammar context and a walker for a vocabulary of a size."""
    if size <= DEMO_SIZE:
        tokenizer = Tokenizer.load(demo_checkpoint())
        config = load_model_config(demo_checkpoint())
        core, size, stops = tokenizers.Tokenizer.from_str(tokenizer.to_json()), config.vocab_size, config.eos_token_ids
    else:
        core = generate_tokenizer(size)
        stops = (core.token_to_id(END_TOKEN),)
    return GrammarContext(core.to_str(), size, tuple(stops)), Walker(core, size, stops)


def create_backend(name: str, context: GrammarContext, options: dict[str, Any]) -> GrammarBackend:
    """Create a backend."""
    registry = Registry.load()
    provider = registry.provider("grammar", name)
    known = {key: value for key, value in options.items() if key in provider.options.model_fields}
    backend: GrammarBackend = registry.create("grammar", provider, known, context, EngineConfig().origins)
    return backend


def judge_of(spec: GrammarSpec, ebnfs: dict[str, Callable[[str], bool]]) -> Judge:
    """Return the judge of a specification."""
    if spec.kind is GrammarKind.JSON_SCHEMA:
        return schema_judge(json.loads(spec.text))
    if spec.kind is GrammarKind.REGEX:
        return lambda text: regex.fullmatch(spec.text, text, regex.ASCII, timeout=MAX_JUDGE_S) is not None
    if spec.kind is GrammarKind.CHOICE:
        return choice_judge(json.loads(spec.text))
    if spec.kind is GrammarKind.STRUCTURAL_TAG:
        return tag_judge(json.loads(spec.text))
    return ebnfs[spec.text]


def measure(
    name: str,
    vocab: tuple[GrammarContext, Walker],
    specs: Sequence[GrammarSpec],
    judge: Callable[[GrammarSpec], Judge],
    row: Row,
    num_walks: int,
    options: dict[str, Any],
) -> Row:
    """Run random walks through all specifications, and return the row with their outcomes."""
    context, walker = vocab
    backend = create_backend(name, context, options)
    start_s = time.perf_counter()
    for index, spec in enumerate(specs):
        row.specs += 1
        compile_start_s = time.perf_counter()
        try:
            compiled = backend.compile(spec)
        except GrammarError as error:
            row.refused += 1
            row.reasons[spec.kind.value] = row.reasons.get(spec.kind.value, 0) + 1
            if "allows tokens that it then rejects" in str(error):
                row.reasons["unsound"] = row.reasons.get("unsound", 0) + 1
            continue
        finally:
            row.compile_s += time.perf_counter() - compile_start_s
        for number in range(num_walks):
            random = Random(f"{name} {context.vocab_size} {index} {number}")
            try:
                walk = walker.walk(compiled.matcher(), random, random.choice(LENGTHS))
                complaints = walk.complaints or complaints_about(judge(spec), walk)
            except GrammarError:
                row.limits += 1
                continue
            except Exception as error:
                walk, complaints = Walk(), [f"{type(error).__name__}: {error}"]
            row.walks += 1
            row.finished += walk.is_finished
            row.tokens += len(walk.token_ids)
            for complaint in complaints[:1]:
                found = {"backend": name, "vocab": context.vocab_size, "kind": spec.kind.value, "spec": spec.text}
                row.disagreements.append(found | {"walk": number, "said": complaint, "text": walk.text})
                print(json.dumps(row.disagreements[-1], ensure_ascii=False)[:1500], file=sys.stderr, flush=True)
    row.seconds = round(time.perf_counter() - start_s, 1)
    row.compile_s = round(row.compile_s, 1)
    return row


def complaints_about(judge: Judge, walk: Walk) -> list[str]:
    """Return the reasons why a walk's text is invalid; none if the walk did not end, or if the judge takes too long."""
    if not walk.is_finished:
        return []
    try:
        return [] if judge(walk.text) else ["the output does not meet its specification"]
    except TimeoutError:
        return []


def line(row: Row) -> str:
    """Return a row as a line of the table."""
    return (
        f"{row.backend:12} {row.vocab_size:7} {row.specs:6} {row.refused:8} {row.walks:6} {row.finished:8} "
        f"{row.limits:6} {row.tokens:8} {len(row.disagreements):13} {row.compile_s:8.1f} s {row.seconds:8.1f} s"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a table; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--specs", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0, help="of the specifications")
    parser.add_argument("--first", type=int, default=0, help="the first specification, of those of the seed")
    parser.add_argument("--walks", type=int, default=2, help="of each specification")
    parser.add_argument("--vocab", type=int, nargs="+", default=[2000, 32_000, 128_000], help="sizes")
    parser.add_argument("--backends", nargs="+", default=sorted(Registry.load().names("grammar")))
    parser.add_argument("--whitespace", default="flexible", help="of JSON")
    parser.add_argument("--max-compile-s", type=float, default=10.0, help="of outlines")
    parser.add_argument("--out", type=Path, help="where to save the table as JSON")
    args = parser.parse_args(arguments)
    num = args.first + args.specs
    ebnfs = {grammar.text: grammar.matches for grammar in generate_ebnfs(num, args.seed)}
    judge = cache(lambda spec: judge_of(spec, ebnfs))
    specs = generate_specs(num, args.seed)[args.first :]
    options = {"whitespace": args.whitespace, "max_compile_s": args.max_compile_s}
    print(
        f"{'backend':12} {'tokens':>7} {'specs':>6} {'refused':>8} {'walks':>6} {'finished':>8} "
        f"{'limits':>6} {'taken':>8} {'DISAGREEMENTS':>13} {'compiling':>10} {'time':>10}",
        flush=True,
    )
    rows = []
    for size in args.vocab:
        vocab = vocabulary(size)
        for name in args.backends:
            row = Row(name, vocab[0].vocab_size)
            rows.append(measure(name, vocab, specs, judge, row, args.walks, options))
            print(line(row), flush=True)
    if args.out:
        args.out.write_text(json.dumps([asdict(row) for row in rows], indent=2, ensure_ascii=False) + "\n")
    return 1 if any(row.disagreements for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
