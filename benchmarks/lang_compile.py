"""Measures the time that compilation of LM programs saves; interpreted and compiled runs alternate in one process.

    python benchmarks/lang_compile.py [--runs N] [--out FILE]

The programs use the bundled model at temperature 0; every run starts with an empty cache. Both ways must generate the
same texts.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from graftlm import Engine, ProgramState, assistant, assistant_begin, function, gen, system, user
from graftlm.lang import EngineBackend, Generation, GenerationRequest
from graftlm.lang.choices import ChoiceScore
from graftlm.records import EngineStats

RESULTS = Path(__file__).parent / "results" / "lang_compile.json"
NOTES = "The capital of France is Paris. The day after Monday is Tuesday. 47 plus 38 is 85. " * 24
ESSAY = (
    "Cities need trees. A tree cools the street below it, it keeps the rain from the drains, and people who see one "
    "from their window sleep better. A city that plants today thanks itself for a hundred years. "
) * 3
DIMENSIONS = ("clarity", "originality", "evidence", "style", "structure", "tone")
QUESTIONS = (
    "What is the capital of France?",
    "Which day comes after Monday?",
    "What is 47 plus 38?",
    "What is 2 + 3?",
    "What is the capital of Peru?",
    "Which day comes after Thursday?",
)


@function
def few_shot(s: ProgramState, notes: str, question: str) -> None:
    """Answer one of many questions after the same notes."""
    s += system(notes)
    s += user(question)
    s += assistant(gen("answer", max_tokens=16))


@function
def debate(s: ProgramState, notes: str, question: str) -> None:
    """Let two sides answer one of many questions after the same notes."""
    s += system(notes)
    with s.fork(2) as sides:
        sides += lambda i: user(f"{('Agree', 'Disagree')[i]}: {question}") + assistant(gen("answer", max_tokens=16))


@function
def judge(s: ProgramState, essay: str, dimensions: Sequence[str]) -> None:
    """Judge an essay by several dimensions after a long instruction, and sum up; the comment is not requested."""
    s += system("You judge essays.") + user(essay)
    forks = s.fork(len(dimensions))
    for fork, dimension in zip(forks, dimensions, strict=True):
        fork += user(
            "Read the essay above again with care, sentence by sentence. Then say in one short sentence, without "
            f"repeating it and without praise, what you think about its {dimension}."
        )
        fork += assistant(gen("judgment", max_tokens=16, ignore_eos=True) + " " + gen("remark", max_tokens=16))
    s += assistant("".join(f"{d}: {f['judgment']}\n" for d, f in zip(dimensions, forks, strict=True)))
    s += user("Sum up.") + assistant(gen("verdict", max_tokens=16, ignore_eos=True) + gen("comment", max_tokens=16))


@function
def examine(s: ProgramState, notes: str, questions: Sequence[str]) -> None:
    """Ask several questions about one text, one after the other, each in a copy of the state."""
    s += system(notes)
    for i, question in enumerate(questions):
        with s.copy() as copy:
            copy += user(question) + assistant(gen(f"answer_{i}", max_tokens=16))


@function
def vote(s: ProgramState, notes: str, question: str, num_answers: int) -> None:
    """Answer a question several times."""
    s += system(notes) + user(question) + assistant_begin()
    with s.fork(num_answers) as forks:
        forks += gen("answer", max_tokens=16)


@dataclass(frozen=True, slots=True)
class Case:
    """A program, its constant arguments, and the arguments of each run in a batch.

    Attributes:
        outputs: names of the requested variables; None: all.
    """

    program: Any
    runs: Sequence[dict[str, Any]]
    constants: dict[str, Any] = field(default_factory=dict)
    outputs: Sequence[str] | None = None


FEW_SHOT_RUNS = [{"question": f"{QUESTIONS[i % 6]} ({i})"} for i in range(32)]
CASES = {
    "few-shot, 32 questions": Case(few_shot, FEW_SHOT_RUNS, {"notes": NOTES}),
    "debate, 16 questions x 2 sides": Case(debate, FEW_SHOT_RUNS[:16], {"notes": NOTES}),
    "judge, 4 essays x 6 dimensions": Case(
        judge, [{"essay": f"Essay {i}. {ESSAY}"} for i in range(4)], {"dimensions": DIMENSIONS}, ["verdict"]
    ),
    "examine, 6 copies": Case(examine, [{}], {"notes": NOTES, "questions": QUESTIONS}),
    "vote, 8 answers": Case(vote, [{"question": QUESTIONS[3]}], {"notes": NOTES, "num_answers": 8}),
}


class CountingBackend(EngineBackend):
    """A backend that counts the requests of programs."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.num_requests = 0

    async def generate(self, request: GenerationRequest) -> list[Generation]:
        """Complete a prompt."""
        self.num_requests += 1
        return await super().generate(request)

    async def score(self, prompt: str, choices: Sequence[str], **options: Any) -> list[ChoiceScore]:
        """Score choices."""
        self.num_requests += 1
        return await super().score(prompt, choices, **options)

    async def cache_prefix(self, prompt: str) -> None:
        """Cache a prompt."""
        self.num_requests += 1
        await super().cache_prefix(prompt)


@dataclass(frozen=True, slots=True)
class Sample:
    """The measurements of one run of a batch."""

    requests: int
    steps: int
    computed_prompt_tokens: int
    generated_tokens: int
    seconds: float
    cpu_seconds: float


@dataclass(frozen=True, slots=True)
class Row:
    """The medians of one case over the runs, for the interpreted and the compiled program."""

    case: str
    requests: tuple[float, float]
    computed_prompt_tokens: tuple[float, float]
    generated_tokens: tuple[float, float]
    steps: tuple[float, float]
    milliseconds: tuple[float, float]
    cpu_milliseconds: tuple[float, float]
    time_ratio: float  # time of interpreted runs / time of compiled runs
    cpu_time_ratio: float


def sample(engine: Engine, backend: CountingBackend, run: Callable[[], list[Any]]) -> tuple[list[Any], Sample]:
    """Run a batch once on an empty cache; return its results and measurements."""
    engine.flush_cache()
    before, num_requests = engine.stats(), backend.num_requests
    start, cpu_start = time.perf_counter(), time.process_time()
    states = run()
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
    after = engine.stats()
    return states, Sample(
        requests=backend.num_requests - num_requests,
        steps=after.steps - before.steps,
        computed_prompt_tokens=after.prompt_tokens
        - before.prompt_tokens
        - (after.cached_tokens - before.cached_tokens),
        generated_tokens=after.generated_tokens - before.generated_tokens,
        seconds=seconds,
        cpu_seconds=cpu_seconds,
    )


def computed(stats: EngineStats) -> int:
    """Return the number of prompt tokens that were not in the cache."""
    return stats.prompt_tokens - stats.cached_tokens


def measure(name: str, case: Case, num_runs: int) -> Row:
    """Run a case interpreted and compiled, alternately.

    Raises:
        RuntimeError: the texts differ.
    """
    compiled = case.program.compile(outputs=case.outputs, **case.constants)
    whole = [case.constants | run for run in case.runs]
    samples: tuple[list[Sample], list[Sample]] = ([], [])
    with Engine(model="demo") as engine:
        backend = CountingBackend(engine)
        options = {"temperature": 0, "backend": backend}
        for run in range(num_runs + 1):  # the first run is a warm-up
            expected, one = sample(engine, backend, lambda: case.program.run_batch(whole, **options))
            states, other = sample(engine, backend, lambda: compiled.run_batch(case.runs, **options))
            check_equal(case, expected, states)
            if run:
                samples[0].append(one)
                samples[1].append(other)

    def median(key: str, scale: float = 1) -> tuple[float, float]:
        one, other = (statistics.median(getattr(s, key) * scale for s in side) for side in samples)
        return round(one, 1), round(other, 1)

    milliseconds, cpu_milliseconds = median("seconds", 1000), median("cpu_seconds", 1000)
    return Row(
        case=name,
        requests=median("requests"),
        computed_prompt_tokens=median("computed_prompt_tokens"),
        generated_tokens=median("generated_tokens"),
        steps=median("steps"),
        milliseconds=milliseconds,
        cpu_milliseconds=cpu_milliseconds,
        time_ratio=round(milliseconds[0] / milliseconds[1], 2),
        cpu_time_ratio=round(cpu_milliseconds[0] / cpu_milliseconds[1], 2),
    )


def check_equal(case: Case, expected: Sequence[ProgramState], states: Sequence[ProgramState]) -> None:
    """Check that the texts or the requested variables of two batches are equal."""
    for one, other in zip(expected, states, strict=True):
        same = (
            one.text() == other.text()
            if case.outputs is None
            else all(one[name] == other[name] for name in case.outputs)
        )
        if not same:
            raise RuntimeError(f"compiled differs: {one.text()!r}, {other.text()!r}")


def main() -> None:
    """Print a table and save it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    heads = (("requests", 12), ("prompt tokens", 16), ("generated", 12), ("steps", 12), ("ms", 18), ("CPU ms", 18))
    print(f"{'interpreted -> compiled':34} " + " ".join(f"{head:>{width}}" for head, width in heads))
    rows = []
    for name, case in CASES.items():
        row = measure(name, case, args.runs)
        rows.append(row)
        columns = [
            (row.requests, 12), (row.computed_prompt_tokens, 16), (row.generated_tokens, 12), (row.steps, 12),
            (row.milliseconds, 18),
            (row.cpu_milliseconds, 18),
        ]  # fmt: skip
        shown = " ".join(f"{f'{one:g} -> {other:g}':>{width}}" for (one, other), width in columns)
        print(f"{name:34} {shown}  {row.time_ratio:.2f}x, CPU {row.cpu_time_ratio:.2f}x", flush=True)
    args.out.parent.mkdir(exist_ok=True)
    args.out.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
