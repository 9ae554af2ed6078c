"""Measures the speed-up of speculation with a random 360M model; generation with and without drafts alternates.

    python benchmarks/speculation.py [--only CASE ...] [--rounds N] [--drafter NAME] [--out FILE]

A random model cannot copy a text. In the cases marked "scripted", a logits processor therefore forces the model to
generate a given text; the model computes every step as usual, with and without speculation. Cases:

    regenerate      scripted: a prompt is answered a second time, with the same answer
    resample        a prompt is answered a second time, sampled with the same seed; steps with drafts round differently,
                    so the answers of a random model soon differ
    edit            scripted: a text of 400 tokens from the prompt, with a change about every 40 tokens
    copy            scripted: answers that quote spans of 12 to 40 tokens from the prompt, between new words
    records         scripted: JSON records with the same keys and indentation
    replay          agents: 12 calls, each with the whole history as its prompt, run a second time
    random          one request with sampled tokens
    random-N        N simultaneous requests with sampled tokens
    edit-N          scripted edits, N simultaneous requests
    load-I-N        part I of a rising and falling load, with N simultaneous requests; every second one is an edit

For each case, tokens per second without and with drafts are printed, and the median of the rounds' ratios.
"""

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from torch import Tensor

import graftlm_speculation
from graftlm import Engine, Provider, SamplingParams, hookimpl
from graftlm.contracts import LogitsProcessor, Options
from graftlm.demo import demo_checkpoint
from graftlm.testing.tiny_models import write_tiny_checkpoint
from graftlm.tokenization import Tokenizer
from graftlm.types import TokenIds

RESULTS = Path(__file__).parent / "results" / "speculation.json"
VOCAB = 49_152
SHAPE = {
    "hidden_size": 960,
    "intermediate_size": 2560,
    "num_layers": 32,
    "num_heads": 15,
    "num_kv_heads": 5,
    "head_dim": 64,
    "vocab_size": VOCAB,
    "tie_word_embeddings": True,
    "max_position_embeddings": 8192,
}

#: A prompt, and its output: scripted tokens, or the number of tokens to sample.
Job = tuple[list[int], list[int] | int]


class ScriptOptions(Options):
    """Options of `script`."""

    token_ids: list[int]


class Script(LogitsProcessor):
    """A logits processor that forces given tokens."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._token_ids = token_ids

    def process(self, output_token_ids: TokenIds, logits: Tensor) -> Tensor:
        """Mask all tokens except the next token of the script."""
        logits.fill_(float("-inf"))
        logits[self._token_ids[min(len(output_token_ids), len(self._token_ids) - 1)]] = 0.0
        return logits


class Scripts:
    """A plugin that provides the logits processor `script`."""

    @hookimpl
    def provide_logits_processors(self) -> list[Provider[LogitsProcessor]]:
        """Return the provider of `script`."""
        create = lambda options, context: Script(options.token_ids)  # noqa: E731
        return [Provider(name="script", summary="Given tokens", api_version=1, create=create, options=ScriptOptions)]


def generate(engine: Engine, jobs: Sequence[Job], seed: int, temperature: float = 1.5) -> tuple[float, int, int]:
    """Run all jobs in one batch; return (time in seconds, number of output tokens, number of accepted draft tokens)."""
    params = []
    for i, (_, output) in enumerate(jobs):
        num_tokens = output if isinstance(output, int) else len(output)
        limits = {"max_tokens": num_tokens, "min_tokens": num_tokens, "ignore_eos": True}
        if isinstance(output, int):
            params.append(SamplingParams(temperature=temperature, seed=seed + i, **limits))
        else:
            processors = {"script": {"token_ids": output}}
            params.append(SamplingParams(temperature=0, logits_processors=processors, **limits))
    start = time.perf_counter()
    outputs = engine.generate([prompt for prompt, _ in jobs], params)
    seconds = time.perf_counter() - start
    return seconds, sum(len(o.token_ids) for o in outputs), sum(o.usage.accepted_draft_tokens for o in outputs)


def text_of(num_tokens: int, seed: int) -> list[int]:
    """Return tokens of English text from the documentation; the seed determines the start position."""
    tokenizer = Tokenizer.load(demo_checkpoint())
    pages = sorted((Path(__file__).parents[1] / "docs").glob("*.md"))
    tokens = tokenizer.encode("\n".join(page.read_text(encoding="utf-8") for page in pages))
    start = random.Random(seed).randrange(len(tokens) - num_tokens)
    return [int(token) for token in tokens[start : start + num_tokens]]


def edit(seed: int) -> Job:
    """Return a job whose prompt is a text of 400 tokens, and whose output is the text with changes."""
    draw, text = random.Random(seed), text_of(400, seed)
    edited = []
    for i, token in enumerate(text):
        if i % 40 == 20:
            edited += [draw.randrange(2000) for _ in range(draw.randint(1, 4))]  # replaces one to three tokens
        elif i % 40 > 20 + draw.randint(0, 2) or i % 40 < 20:
            edited.append(token)
    return [*text_of(30, seed + 1), *text, *text_of(20, seed + 2)], edited


def copy(seed: int) -> Job:
    """Return a job whose prompt has passages, and whose output quotes them."""
    draw, passages = random.Random(seed), text_of(900, seed)
    answer: list[int] = []
    while len(answer) < 300:
        start, length = draw.randrange(850), draw.randint(12, 40)
        answer += [draw.randrange(2000) for _ in range(draw.randint(3, 9))] + passages[start : start + length]
    return passages, answer[:300]


def records(seed: int) -> Job:
    """Return a job whose prompt requests JSON records, and whose output has the records."""
    draw = random.Random(seed)
    rows = [
        {
            "identifier": draw.randrange(10_000),
            "customer_name": draw.choice(["Ada", "Grace", "Alan", "Edsger", "Barbara"]),
            "country": draw.choice(["Norway", "Peru", "France", "Japan"]),
            "is_active": draw.random() < 0.5,
            "amount": round(draw.random() * 1000, 2),
        }
        for _ in range(8)
    ]
    tokens = Tokenizer.load(demo_checkpoint()).encode(json.dumps(rows, indent=2))
    return text_of(60, seed), [int(token) for token in tokens]


def mixed(seed: int, num_requests: int) -> list[Job]:
    """Return jobs that alternately edit a text and sample tokens."""
    jobs: list[Job] = []
    for i in range(num_requests):
        if i % 2:
            jobs.append((text_of(50, seed + i), 40))
        else:
            prompt, edited = edit(seed + i)
            jobs.append((prompt, edited[:80]))
    return jobs


class Case:
    """One workload of the measurement.

    Args:
        jobs: function that returns the jobs of one batch for a seed.
        is_repeated: whether the case runs twice with the same seed, so that only the second run is measured.
    """

    def __init__(self, jobs: Callable[[int], list[Job]], *, is_repeated: bool = False) -> None:
        self.jobs = jobs
        self.is_repeated = is_repeated

    def run(self, engine: Engine, seed: int) -> tuple[float, int, int]:
        """Return (time in seconds, number of output tokens, number of accepted draft tokens)."""
        jobs = self.jobs(seed)
        if self.is_repeated:
            generate(engine, jobs, seed)
        return generate(engine, jobs, seed)


class Agents(Case):
    """A workload of agents: the prompt of each call is the whole history, and a second run repeats the first one."""

    def __init__(self) -> None:
        super().__init__(lambda seed: [])

    def run(self, engine: Engine, seed: int) -> tuple[float, int, int]:
        """Run the calls twice; return the figures of the second run, as `Case.run` does."""
        self._play(engine, seed)
        return self._play(engine, seed)

    def _play(self, engine: Engine, seed: int) -> tuple[float, int, int]:
        sums = [0.0, 0, 0]
        history = text_of(300, seed)
        for call in range(12):
            answer = text_of(40 + 10 * (call % 4), seed + 100 + call)
            result = generate(engine, [(history, answer)], seed)
            sums = [a + b for a, b in zip(sums, result, strict=True)]
            history = [*history, *answer, *text_of(60, seed + 200 + call)]
        return sums[0], int(sums[1]), int(sums[2])


CASES: dict[str, Case] = {
    "regenerate": Case(lambda seed: [(text_of(200, seed), text_of(200, seed + 1))], is_repeated=True),
    "resample": Case(lambda seed: [(text_of(200, seed), 200)], is_repeated=True),
    "edit": Case(lambda seed: [edit(seed)]),
    "copy": Case(lambda seed: [copy(seed)]),
    "records": Case(lambda seed: [records(seed)]),
    "replay": Agents(),
    "random": Case(lambda seed: [(text_of(200, seed), 150)]),
    "random-32": Case(lambda seed: [(text_of(50, seed + i), 60) for i in range(32)]),
    "random-64": Case(lambda seed: [(text_of(50, seed + i), 40) for i in range(64)]),
    "edit-8": Case(lambda seed: [edit(seed + i) for i in range(8)]),
    "edit-32": Case(lambda seed: [edit(seed + i) for i in range(32)]),
}
_LOADS = (1, 2, 4, 8, 16, 32, 64, 32, 16, 8, 4, 2, 1)
CASES |= {
    f"load-{i:02}-{num}": Case(lambda seed, i=i, num=num: mixed(seed + 50 * i, num)) for i, num in enumerate(_LOADS)
}


def measure(engines: dict[str, Engine], case: Case, rounds: int) -> dict[str, Any]:
    """Run a case with both engines; the order of the engines alternates."""
    speeds: dict[str, list[float]] = {name: [] for name in engines}
    accepted = num_tokens = 0
    for i in range(rounds):
        for name in sorted(engines, reverse=bool(i % 2)):
            seconds, num_tokens, num_accepted = case.run(engines[name], 1000 * (i + 1))
            speeds[name].append(num_tokens / seconds)
            if name == "drafts":
                accepted += num_accepted
    ratios = [drafts / plain for drafts, plain in zip(speeds["drafts"], speeds["plain"], strict=True)]
    return {
        "plain_tokens_per_s": round(statistics.median(speeds["plain"]), 1),
        "drafts_tokens_per_s": round(statistics.median(speeds["drafts"]), 1),
        "ratio": round(statistics.median(ratios), 3),
        "ratios": [round(ratio, 3) for ratio in ratios],
        "accepted_share": round(accepted / (rounds * num_tokens), 3),
    }


def main() -> None:
    """Measure the cases, print a table, and write it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--drafter", default="auto")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    console, results = Console(), {}
    with tempfile.TemporaryDirectory() as folder:
        path = write_tiny_checkpoint(Path(folder), **SHAPE)
        for file in demo_checkpoint().glob("tokenizer*"):
            (path / file.name).write_bytes(file.read_bytes())
        sections = {"model": {"path": str(path), "dtype": "bfloat16"}, "memory": {"kv_tokens": 40_000}}
        plugins = [Scripts(), graftlm_speculation]
        with (
            Engine({"speculation": None, **sections}, plugins=plugins) as plain,
            Engine({"speculation": options.drafter, **sections}, plugins=plugins) as drafts,
        ):
            engines = {"plain": plain, "drafts": drafts}
            measure(engines, CASES["random"], 1)  # warm-up
            for name in options.only:
                results[name] = measure(engines, CASES[name], options.rounds)
                console.print(name, results[name])
    table = Table("case", "without, tokens/s", "with drafts", "ratio", "tokens from drafts")
    for name, row in results.items():
        speeds = f"{row['plain_tokens_per_s']}", f"{row['drafts_tokens_per_s']}", f"{row['ratio']:.2f}"
        table.add_row(name, *speeds, f"{row['accepted_share']:.0%}")
    console.print(table)
    options.out.write_text(json.dumps({"median_of": options.rounds, "cases": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
