"""Measures what every registered grammar backend enforces, and writes docs/grammar-support.md.

    python benchmarks/grammar_support.py [--out FILE] [--walks N]

Each specification is compiled for the bundled tokenizer. The backend must allow texts that meet the specification, and
no texts that violate it. Texts that random walks over the masks generate must meet it too; jsonschema, Python's re and
string comparison decide whether they do. A backend that compiles a specification and then allows a violation has a
defect (`IGNORED`), and the exit status is 1.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import groupby
from pathlib import Path

import numpy as np
from grammar_cases import Case, cases

from graftlm.contracts import GrammarBackend, GrammarContext, GrammarKind, GrammarMatcher, GrammarSpec
from graftlm.demo import demo_checkpoint
from graftlm.errors import GrammarError
from graftlm.registry import Registry
from graftlm.tokenization import Tokenizer

PAGE = Path(__file__).parents[1] / "docs" / "grammar-support.md"
MAX_TOKENS = 60
SEED = 0
#: A long time limit, so that a slow compilation on a busy machine does not count as a refusal.
_OPTIONS = {"outlines": {"max_compile_s": 600.0}}
CLOSING = frozenset('"]})>')


class Outcome(str, Enum):
    """The result of a backend for a specification."""

    ENFORCED = "enforced"
    REFUSED = "refused"
    BLOCKED = "BLOCKED"
    IGNORED = "IGNORED"


DEFECTS = frozenset({Outcome.BLOCKED, Outcome.IGNORED})


@dataclass(frozen=True, slots=True)
class Finding:
    """The finding for one case and one backend.

    Attributes:
        num_texts: number of texts that random walks have generated.
        detail: error message, or the text that shows the defect; empty if the specification is enforced.
    """

    case: Case
    backend: str
    outcome: Outcome
    num_texts: int
    detail: str


class Examiner:
    """Tests one backend with cases."""

    def __init__(self, name: str, backend: GrammarBackend, tokenizer: Tokenizer, num_walks: int) -> None:
        self._name = name
        self._backend = backend
        self._tokenizer = tokenizer
        self._num_walks = num_walks
        self._stop_token_ids = frozenset(tokenizer.eos_token_ids)
        texts = [tokenizer.decode([token_id]) for token_id in range(tokenizer.vocab_size)]
        self._is_closing = np.array([bool(text) and set(text) <= CLOSING for text in texts])

    def examine(self, case: Case) -> Finding:
        """Compile a case, and test its hand-written texts and the texts of random walks."""
        spec = GrammarSpec(case.kind, case.spec)
        try:
            self._backend.check(spec)
            compiled = self._backend.compile(spec)
        except GrammarError as error:
            return self._refused(case, str(error))
        for text in case.invalid:
            if self._accepts(compiled.matcher(), text):
                return Finding(case, self._name, Outcome.IGNORED, 0, f"allowed: {text!r}")
        rng = np.random.default_rng(SEED)
        walked = [self._walk(compiled.matcher(), rng) for _ in range(self._num_walks)]
        texts = [text for text in walked if text is not None]
        for text in texts:
            if not case.judge(text):
                return Finding(case, self._name, Outcome.IGNORED, len(texts), f"a walk ended with {text!r}")
        for text in case.valid:
            if not self._accepts(compiled.matcher(), text):
                return Finding(case, self._name, Outcome.BLOCKED, len(texts), f"not allowed: {text!r}")
        return Finding(case, self._name, Outcome.ENFORCED, len(texts), "")

    def _refused(self, case: Case, message: str) -> Finding:
        """Return the finding for a refused case; a defect if `check` with `strict=False` returns nothing unenforced."""
        outcome, detail = Outcome.REFUSED, message
        try:
            unenforced = self._backend.check(GrammarSpec(case.kind, case.spec, strict=False))
        except GrammarError:
            unenforced = ("all",)
        if not unenforced:
            outcome, detail = Outcome.IGNORED, f"strict=False names nothing, though strict says: {message}"
        return Finding(case, self._name, outcome, 0, detail)

    def _accepts(self, matcher: GrammarMatcher, text: str) -> bool:
        token_ids = [*self._tokenizer.encode(text, add_special_tokens=False), min(self._stop_token_ids)]
        return all(matcher.accept(token_id) for token_id in token_ids)

    def _walk(self, matcher: GrammarMatcher, rng: np.random.Generator) -> str | None:
        """Return the text of a random walk; None if it does not end within the limit.

        If the mask allows tokens that close a structure, or a stop token, half of the steps choose one of these.
        """
        mask = np.zeros((1, -(-self._tokenizer.vocab_size // 32)), dtype=np.int32)
        token_ids: list[int] = []
        for _ in range(MAX_TOKENS):
            matcher.fill_bitmask(mask, 0)
            allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
            if not len(allowed):
                raise RuntimeError(f"{self._name}: nothing is allowed after {self._tokenizer.decode(token_ids)!r}")
            closing = [i for i in allowed if self._is_closing[i] or i in self._stop_token_ids]
            token_id = int(rng.choice(closing if closing and rng.random() < 0.5 else allowed))
            if not matcher.accept(token_id):
                raise RuntimeError(f"{self._name}: the mask allows token {token_id}, the matcher does not")
            if token_id in self._stop_token_ids:
                return self._tokenizer.decode(token_ids)
            token_ids.append(token_id)
        return None


def backends(registry: Registry, tokenizer: Tokenizer) -> dict[str, GrammarBackend]:
    """Create every grammar backend that can run on this machine, with its default options."""
    context = GrammarContext(tokenizer.to_json(), tokenizer.vocab_size, tuple(tokenizer.eos_token_ids))
    providers = [registry.provider("grammar", provider.name) for provider in registry.available("grammar")]
    return {one.name: registry.create("grammar", one, _OPTIONS.get(one.name, {}), context) for one in providers}


def check_case(case: Case) -> None:
    """Check that the judge agrees with the case's valid and invalid texts; otherwise the case or the judge is wrong."""
    wrong = [text for text in case.valid if not case.judge(text)] + [text for text in case.invalid if case.judge(text)]
    if wrong:
        raise ValueError(f"{case.section}, {case.feature}, {case.spec}: the judge disagrees about {wrong}")


def page(findings: Sequence[Finding]) -> str:
    """Return the support table as Markdown."""
    names = list(dict.fromkeys(finding.backend for finding in findings))
    of_case = {(id(finding.case), finding.backend): finding.outcome.value for finding in findings}
    all_cases = list({id(finding.case): finding.case for finding in findings}.values())
    num_texts = sum(finding.num_texts for finding in findings)
    lines = [
        "<!-- Generated by `python benchmarks/grammar_support.py`: do not edit. -->",
        "",
        "# What grammar backends enforce",
        "",
        f"Measured by `python benchmarks/grammar_support.py` with {len(all_cases)} specifications, and with "
        f"{num_texts:,} texts of random walks under the masks.",
        "",
        "- *enforced*: matching texts are allowed, other texts are not, and all walks ended with matching texts. The",
        "  checks use jsonschema, Python's `re` and similar tools. A backend may allow only a part of the matching",
        "  texts: [structured-generation.md](structured-generation.md#json-schemas).",
        "- *refused*: the specification is refused by a `GrammarError` with the reason. With `strict=False` it is",
        "  refused, or the keyword is ignored and reported.",
        "- *IGNORED*: a violating text was allowed. *BLOCKED*: a matching text was not allowed. Both are defects; this"
        f" page has {sum(finding.outcome in DEFECTS for finding in findings) or 'none'}.",
    ]
    for section, rows in groupby(all_cases, key=lambda case: case.section):
        lines += [
            "",
            f"## {section}",
            "",
            f"| | Specification | {' | '.join(names)} |",
            f"|---|---|{'---|' * len(names)}",
        ]
        for case in rows:
            cells = [of_case[id(case), name] for name in names]
            lines.append(f"| {_escaped(_feature(case))} | {_code(case)} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _feature(case: Case) -> str:
    words = case.feature.replace(",", "").split()
    is_name = case.kind is GrammarKind.JSON_SCHEMA and len(words) == 1
    return f"`{case.feature}`" if is_name else case.feature


def _code(case: Case) -> str:
    text = case.spec if case.kind is not GrammarKind.EBNF else case.spec.replace("\n", " ↵ ")
    return f"`{_escaped(text)}`"


def _escaped(text: str) -> str:
    return text.replace("|", "\\|")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the defects, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=PAGE, help="the page to write")
    parser.add_argument("--walks", type=int, default=30, help="random walks per specification and backend")
    settings = parser.parse_args(arguments)
    tokenizer = Tokenizer.load(demo_checkpoint())
    all_cases = list(cases())
    for case in all_cases:
        check_case(case)
    examiners = [
        Examiner(name, backend, tokenizer, settings.walks)
        for name, backend in backends(Registry.load(), tokenizer).items()
    ]
    findings = [examiner.examine(case) for case in all_cases for examiner in examiners]
    settings.out.write_text(page(findings), encoding="utf-8")
    defects = [finding for finding in findings if finding.outcome in DEFECTS]
    for one in defects:
        print(
            f"{one.backend}: {one.outcome.value}: {one.case.section}, {one.case.feature}: {one.case.spec}: {one.detail}"
        )
    for outcome in Outcome:
        print(f"{sum(finding.outcome is outcome for finding in findings)} {outcome.value}")
    return 1 if defects else 0


if __name__ == "__main__":
    sys.exit(main())
