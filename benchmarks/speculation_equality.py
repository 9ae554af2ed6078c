"""Compares random requests with and without speculation: tokens, text, finish reasons, log-probabilities.

    python benchmarks/speculation_equality.py [--requests 20000] [--first ROUND] [--out FILE]

Each round draws an engine (cache, page size, prefill chunk, overlap, memory, jump-forward, quantization of weights and
of keys and values, length of drafts) and 200 requests with random parameters and adapters. The requests run without
drafts, with the drafters of `auto`, and with drafts that consist of the right output with some mistakes. In one more
run, requests are aborted after a random time; after this run, no page may be in use. The bundled model computes in
float32.

In half of the rounds, all drafts are verified, whether they save time or not.

A step with drafts multiplies matrices of other shapes, and may therefore round differently. At the first token that
differs, the log-probabilities of the two tokens are compared. A difference of less than 1e-4 is counted, and a larger
one is an error.

Keys and values of int8 are rounded to steps that are larger than 1e-4, so a difference of one bit may move a value by a
whole step. In rounds with int8, differences are therefore counted instead, and a control shows how many there are
without drafts: plain decoding with other prefill chunks and batch sizes.

The exit status is 1 if there is an error.
"""

import argparse
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

import graftlm_speculation
from graftlm import Engine, Provider, RequestOutput, SamplingParams, hookimpl
from graftlm.contracts import Draft, Drafter, DraftRequest, LogitsProcessor
from graftlm.demo import demo_checkpoint
from graftlm.speculation.draft_budget import DraftBudget
from graftlm.testing.aged_server import write_random_adapter
from graftlm.testing.drafter import AllDrafts
from graftlm.types import TokenIds

RESULTS = Path(__file__).parent / "results" / "speculation_equality.json"
BATCH = 200
MAX_LOGPROB_DIFFERENCE = 1e-4
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Oslo", "Lima"]}, "people": {"type": "integer", "minimum": 0}},
    "required": ["city", "people"],
    "additionalProperties": False,
}
QUESTIONS = (
    "What is the capital of France?",
    "What is the capital of Norway?",
    "Count from one to ten.",
    "Name three colours.",
    "How many days has a week?",
)
REGEXES = ("[A-Z][a-z ]{3,30}[.]", "(ab|cd|[0-9]){4,12}", "The (first|second) answer is .*")
TEXTS = ("1, 2, 3, 4, 1, 2, 3, 4, 1, 2", "Once upon a time", "The answer is", "x", "a b a b a b a b a")


class NotTwice(LogitsProcessor):
    """A logits processor that forbids a repetition of the latest token."""

    def process(self, output_token_ids: TokenIds, logits: Any) -> Any:
        """Set the latest token's logit to -inf."""
        if len(output_token_ids):
            logits[output_token_ids[-1]] = -np.inf
        return logits


class Replay(Drafter):
    """A drafter that knows the outputs in advance: it drafts their next tokens, with some mistakes."""

    def __init__(self, texts: Sequence[TokenIds], seed: int) -> None:
        self._by_start: dict[bytes, list[TokenIds]] = {}
        for text in texts:
            self._by_start.setdefault(text[:4].tobytes(), []).append(text)
        self._random = random.Random(seed)

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft | None]:
        """Return drafts; a third of them contain a wrong token."""
        return [self._draft(request) for request in requests]

    def _draft(self, request: DraftRequest) -> Draft | None:
        done = len(request.token_ids)
        known = self._by_start.get(request.token_ids[:4].tobytes(), [])
        fits = [text for text in known if len(text) > done and np.array_equal(text[:done], request.token_ids)]
        if not fits:
            return None
        token_ids = self._random.choice(fits)[done : done + self._random.randint(1, request.limit)].copy()
        if self._random.random() < 0.3:
            token_ids[self._random.randrange(len(token_ids))] = self._random.randrange(300)
        return Draft(token_ids, 0.9)


class Plugin:
    """A plugin that provides the processor and the drafter; the drafts are parts of `texts`."""

    def __init__(self) -> None:
        self.texts: list[TokenIds] = []

    @hookimpl
    def provide_logits_processors(self) -> list[Provider[LogitsProcessor]]:
        """Return the provider of `not-twice`."""
        return [Provider(name="not-twice", summary="No token twice", api_version=1, create=lambda o, c: NotTwice())]

    @hookimpl
    def provide_drafters(self) -> list[Provider[Drafter]]:
        """Return the provider of `replay`."""
        create = lambda o, c: Replay(self.texts, 0)  # noqa: E731
        return [Provider(name="replay", summary="The right output, with mistakes", api_version=1, create=create)]


def draw_engine(draw: random.Random, adapter: Path) -> dict[str, Any]:
    """Return a random engine configuration."""
    cache = draw.choice(["radix", "radix", "chunk", "hicache"])
    page_size = draw.choice([1, 4, 16])
    options = {"host_tokens": 4096, "block_tokens": 2 * page_size} if cache == "hicache" else {}
    return {
        "model": {
            "path": "demo",
            "dtype": "float32",
            "quantization": draw.choice([None, None, None, {"name": "int8"}, {"name": "int4"}]),
        },
        "cache": {"name": cache, "page_size": page_size, "options": options},
        "lora": {"adapters": {"a": str(adapter)}, "max_rank": 4} if draw.random() < 0.3 else {},
        "scheduling": {
            "prefill_tokens_per_step": draw.choice([7, 64, 2048]),
            "overlap": draw.random() < 0.6,
            "max_running_requests": draw.choice([1, 2, 4, 16]),
        },
        "memory": {"kv_tokens": draw.choice([600, 3000, 30_000]), "kv_dtype": draw.choice(["auto", "auto", "int8"])},
        "grammar": {"jump_forward": draw.choice(["fast", "exact", False])},
        "debug": True,
    }


def draw_params(draw: random.Random) -> SamplingParams:
    """Return random sampling parameters of a request."""
    fields: dict[str, Any] = {"temperature": draw.choice([0, 0.8, 1.5]), "seed": draw.randrange(1 << 30)}
    fields["max_tokens"] = draw.choice([1, 2, 5, 20, 40])
    for name, values in {
        "top_p": [0.7, 0.95],
        "top_k": [1, 5, 50],
        "min_p": [0.05, 0.2],
        "repetition_penalty": [0.8, 1.3],
        "frequency_penalty": [-0.5, 0.7],
        "presence_penalty": [0.4],
        "logit_bias": [{5: 3.0, 9: -100.0}],
        "min_tokens": [min(3, fields["max_tokens"])],
        "logits_processors": [{"not-twice": {}}],
        "logprobs": [0, 2],
        "stop": [["a"], ["3", "is"]],
        "n": [2],
    }.items():
        if draw.random() < 0.15:
            fields[name] = draw.choice(values)
    kind = draw.random()
    if kind < 0.1:
        fields["json_schema"] = SCHEMA
    elif kind < 0.2:
        fields["regex"] = draw.choice(REGEXES)
    if kind < 0.2:
        fields["grammar_backend"] = draw.choice(["xgrammar", "llguidance", "outlines"])
    return SamplingParams(**fields)


def draw_prompt(draw: random.Random) -> Any:
    """Return a random prompt: a text or a chat."""
    if draw.random() < 0.5:
        return draw.choice(TEXTS) + " " * draw.randint(0, 2)
    return [{"role": "user", "content": draw.choice(QUESTIONS)}]


def facts(output: RequestOutput, index: int) -> tuple[Any, ...]:
    """Return the parts of one completion that must be equal."""
    one = output.completions[index]
    return one.token_ids, one.text, one.finish_reason, one.matched_stop, one.error


class Comparison:
    """A comparison of outputs with those of plain decoding.

    Args:
        judge: engine that computes the log-probabilities of tokens that differ.
        counts: counts of the results, which are increased.

    Attributes:
        errors: descriptions of differences that rounding does not explain.
    """

    def __init__(self, judge: Engine, counts: Counter[str]) -> None:
        self.counts = counts
        self.errors: list[str] = []
        self._judge = judge

    def add(self, params: Sequence[SamplingParams], plain: list[RequestOutput], other: list[RequestOutput]) -> None:
        """Compare the outputs of the same requests with and without speculation."""
        for one, expected, found in zip(params, plain, other, strict=True):
            for index in range(len(expected.completions)):
                self.counts["completions"] += 1
                self.counts["tokens"] += len(expected.completions[index].token_ids)
                if facts(expected, index) != facts(found, index):
                    self._explain(one, expected, found, index)
                elif one.logprobs is not None:
                    self._compare_logprobs(one, expected, found, index)

    def _compare_logprobs(
        self, params: SamplingParams, expected: RequestOutput, found: RequestOutput, index: int
    ) -> None:
        values = [np.array([token.logprob for token in o.completions[index].logprobs or ()]) for o in (expected, found)]
        if len(values[0]) != len(values[1]):
            self.errors.append(f"{len(values[0])} log-probabilities became {len(values[1])} with {params}")
        elif len(values[0]) and (difference := float(np.abs(values[0] - values[1]).max())) >= MAX_LOGPROB_DIFFERENCE:
            self.errors.append(f"log-probabilities differ by {difference:.1e} with {params}")

    def _explain(self, params: SamplingParams, expected: RequestOutput, found: RequestOutput, index: int) -> None:
        one, other = expected.completions[index].token_ids, found.completions[index].token_ids
        same = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)
        if same is None:
            self.errors.append(f"{facts(expected, index)} became {facts(found, index)} with {params}")
            return
        prompt = [*expected.prompt_token_ids, *one[:same]]
        ranking = SamplingParams(temperature=0, max_tokens=1, logprobs=20)
        (judged,) = self._judge.generate([prompt], ranking)
        top = dict((judged.completions[0].logprobs or ())[0].top)
        if abs(top.get(one[same], 0.0) - top.get(other[same], 9.0)) < MAX_LOGPROB_DIFFERENCE:
            self.counts["rounded differently"] += 1
        else:
            self.errors.append(f"token {same} of {one} became {other[same]} with {params}")


class Round:
    """One engine configuration and its requests.

    Args:
        seed: seed of all random choices.
        adapter: folder of the adapter `a`.

    Attributes:
        sections: the configuration.
    """

    def __init__(self, seed: int, adapter: Path) -> None:
        self._draw = draw = random.Random(seed)
        self.sections = draw_engine(draw, adapter)
        self._prompts = [draw_prompt(draw) for _ in range(BATCH)]
        self._params = [draw_params(draw) for _ in range(BATCH)]
        self._adapters = [draw.choice(["a", None]) if self.sections["lora"] else None for _ in range(BATCH)]
        self._max_drafts = draw.choice([2, 5, 15, 64])
        self._verifies_all = draw.random() < 0.5

    def play(self, judge: Engine) -> tuple[Counter[str], list[str]]:
        """Run and compare the requests; return counts of the results, and the errors."""
        counts: Counter[str] = Counter(requests=BATCH)
        plugin, errors = Plugin(), []
        with self._engine(plugin, None) as engine:
            plain = self._run(engine)
        plugin.texts = [
            np.array([*output.prompt_token_ids, *one.token_ids], dtype=np.int32)
            for output in plain
            for one in output.completions
        ]
        for drafter in ("auto", "replay", "eagle3"):
            comparison = Comparison(judge, counts)
            with self._engine(plugin, drafter) as engine:
                comparison.add(self._params, plain, self._run(engine))
                for drafted, accepted in engine.stats().drafts.values():
                    counts["drafted tokens"] += drafted
                    counts["accepted tokens"] += accepted
                self._run(engine, timeout_s=self._draw.choice([0.05, 0.2]))
                if engine.stats().owned_pages:
                    errors.append("pages are in use after requests were aborted")
            errors += self._classified(comparison, "with int8 keys, drafts")
        if self._is_rough:
            control = Comparison(judge, Counter())
            with self._engine(plugin, None, prefill_tokens_per_step=5, max_running_requests=3) as engine:
                control.add(self._params, plain, self._run(engine))
            errors += self._classified(control, "with int8 keys, control")
            counts["with int8 keys, control"] += control.counts["with int8 keys, control"]
        return counts, [f"{error}; {self.sections}" for error in errors]

    @property
    def _is_rough(self) -> bool:
        return bool(self.sections["memory"]["kv_dtype"] == "int8")

    def _classified(self, comparison: Comparison, name: str) -> list[str]:
        """Return a comparison's errors; with int8 keys, count them instead."""
        if not self._is_rough:
            return comparison.errors
        comparison.counts[name] += len(comparison.errors)
        return []

    def _engine(self, plugin: Plugin, drafter: str | None, **scheduling: int) -> Engine:
        sections = {**self.sections, "scheduling": {**self.sections["scheduling"], **scheduling}}
        options = {"path": "demo-eagle3", "max_drafts": min(self._max_drafts, 6)} if drafter == "eagle3" else {}
        speculation = {"drafter": {"name": drafter, "options": options}, "max_drafts": self._max_drafts}
        budget = (lambda costs, max_drafts: AllDrafts(max_drafts)) if self._verifies_all else DraftBudget
        with mock.patch("graftlm.speculation.speculator.DraftBudget", budget):
            return Engine({"speculation": speculation, **sections}, plugins=[plugin, graftlm_speculation])

    def _run(self, engine: Engine, timeout_s: float | None = None) -> list[RequestOutput]:
        return engine.generate(self._prompts, self._params, timeout_s=timeout_s, adapter=self._adapters)


def main() -> int:
    """Compare, print counts and errors, write them, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--first", type=int, default=0, help="the first round, which is also its seed")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    start_s, totals, errors = time.monotonic(), Counter[str](), []
    with tempfile.TemporaryDirectory() as folder, Engine(model={"path": "demo", "dtype": "float32"}) as judge:
        adapter = write_random_adapter(Path(folder) / "adapter", demo_checkpoint())
        for seed in range(options.first, options.first - (-options.requests // BATCH)):
            counts, found = Round(seed, adapter).play(judge)
            totals += counts
            errors += [f"round {seed}: {error}" for error in found]
            print(f"round {seed}: {dict(totals)}", *errors[-len(found) :] if found else (), sep="\n", flush=True)
    seconds = round(time.monotonic() - start_s)
    result = {"first": options.first, **totals, "errors": errors, "seconds": seconds}
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{len(errors)} errors, {seconds} s")
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
