"""Measures the time that `select` saves by computing its prompt once: eight choices after a prompt of 1,000 tokens.

    python benchmarks/lang_select.py [--model PATH] [--runs N] [--out FILE]

The same selects run on two backends, which alternate. `recompute` requests the log-probabilities of each choice's whole
prompt, so the prompt is computed in full for every choice. `shared` is the method of `graftlm.lang`. "cold" begins with
an empty cache. In "warm" the prompt is cached, and the program generates two tokens before the select; the measured
time includes them.
"""

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from graftlm import Engine, SamplingParams, function, gen, select
from graftlm.lang import ChoiceScore, ChoicesMethod, EngineBackend, ProgramState
from graftlm.lang.backends.scoring import ScoringBatch
from graftlm.lang.choices import CHOICES_METHODS
from graftlm.types import Message

RESULTS = Path(__file__).parent / "results" / "lang_select.json"
NUM_TOKENS = 1000
CHOICES = [" Paris", " Athens", " Lima", " Rome", " Oslo", " Bern", " Madrid", " none of these"]


class RecomputingBackend(EngineBackend):
    """A backend that scores choices as if prompt log-probabilities were only available for the whole prompt."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self._it = engine

    async def score(
        self, prompt: str, choices: Sequence[str], *, unconditional: bool, messages: Sequence[Message] = ()
    ) -> list[ChoiceScore]:
        """Return the likelihood of each choice."""
        encode = self._it.tokenizer.encode
        whole = [encode(prompt + choice).tolist() for choice in choices]
        batch = ScoringBatch.of(choices, encode(prompt).tolist(), whole, unconditional)
        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
        outputs = await self._it.agenerate(batch.prompts, params)
        rows = [
            [0.0 if t is None else t.logprob for t in (output.prompt_logprobs or ())[start:]]
            for output, start in zip(outputs, batch.starts, strict=True)
        ]
        return batch.scores(rows, [output.usage.cached_tokens for output in outputs])


@dataclass(frozen=True, slots=True)
class Row:
    """The medians of one case over the runs, and the times of `recompute` divided by those of `shared`.

    Attributes:
        time_ratio: ratio of the medians; `time_ratio_min` and `time_ratio_max` are the range over the pairs of runs.
        cpu_ratio: the same for this process's CPU time, which other load on the machine affects less.
    """

    method: str
    cache: str
    prompt_tokens: int
    prefilled_recompute: float
    prefilled_shared: float
    prefilled_ratio: float
    ms_recompute: float
    ms_shared: float
    time_ratio: float
    time_ratio_min: float
    time_ratio_max: float
    cpu_ratio: float
    cpu_ratio_min: float
    cpu_ratio_max: float


@function
def choose(s: ProgramState, prompt: str, warm: bool, method: ChoicesMethod) -> None:
    """Select one of the choices after a prompt."""
    s += prompt
    if warm:
        s += gen("reasoning", max_tokens=2, ignore_eos=True)
    s += select("choice", CHOICES, choices_method=method)


def prompt_of(engine: Engine, run: int) -> str:
    """Return a text of at least NUM_TOKENS tokens; texts of different runs differ from the first token on."""
    words = f"{run} is the number of this run, whose text goes on and on and tells of cities and of days. ".split(" ")
    text = ""
    while len(engine.tokenizer.encode(text)) < NUM_TOKENS:
        text += " ".join(words)
    return text


def measure(engine: Engine, method: ChoicesMethod, warm: bool, num_runs: int) -> Row:
    """Run a case on both backends, alternately."""
    backends = {"recompute": RecomputingBackend(engine), "shared": EngineBackend(engine)}
    seconds: dict[str, list[float]] = {name: [] for name in backends}
    cpu_seconds: dict[str, list[float]] = {name: [] for name in backends}
    prefilled: dict[str, list[int]] = {name: [] for name in backends}
    for run in range(num_runs + 1):  # the first run is a warm-up
        prompt, chosen = prompt_of(engine, run), []
        for name, backend in backends.items():
            engine.flush_cache()
            if warm:
                choose.run(prompt, True, method, backend=backend, temperature=0)
            before, start, cpu_start = engine.stats(), time.perf_counter(), time.process_time()
            state = choose.run(prompt, warm, method, backend=backend, temperature=0)
            taken, cpu_taken, after = time.perf_counter() - start, time.process_time() - cpu_start, engine.stats()
            chosen.append(state["choice"])
            if run:
                seconds[name].append(taken)
                cpu_seconds[name].append(cpu_taken)
                prompt_tokens, cached = after.prompt_tokens - before.prompt_tokens, after.cached_tokens
                prefilled[name].append(prompt_tokens - (cached - before.cached_tokens))
        if len(set(chosen)) > 1:
            raise RuntimeError(f"the backends chose differently: {chosen}")
    ms = {name: 1000 * statistics.median(values) for name, values in seconds.items()}
    tokens = {name: statistics.median(values) for name, values in prefilled.items()}
    return Row(
        method=method.name,
        cache="warm" if warm else "cold",
        prompt_tokens=len(engine.tokenizer.encode(prompt)),
        prefilled_recompute=tokens["recompute"],
        prefilled_shared=tokens["shared"],
        prefilled_ratio=round(tokens["recompute"] / tokens["shared"], 1),
        ms_recompute=round(ms["recompute"], 1),
        ms_shared=round(ms["shared"], 1),
        **ratios("time_ratio", seconds),
        **ratios("cpu_ratio", cpu_seconds),
    )


def ratios(name: str, seconds: dict[str, list[float]]) -> dict[str, float]:
    """Return the ratio of the two backends' medians, and the smallest and largest ratio of a pair of runs."""
    recompute, shared = seconds["recompute"], seconds["shared"]
    pairs = [theirs / ours for theirs, ours in zip(recompute, shared, strict=True)]
    values = (statistics.median(recompute) / statistics.median(shared), min(pairs), max(pairs))
    return {f"{name}{end}": round(value, 1) for end, value in zip(("", "_min", "_max"), values, strict=True)}


def main() -> None:
    """Print a table and save it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    rows = []
    print(f"{'method':36} {'cache':5} {'prefill':>8} {'shared':>7} {'fewer':>6} {'ms':>8} {'shared':>7} {'faster':>7}")
    with Engine(model=args.model, memory={"kv_tokens": 32768}) as engine:
        for method in CHOICES_METHODS.values():
            for warm in (False, True):
                row = measure(engine, method, warm, args.runs)
                rows.append(row)
                print(
                    f"{row.method:36} {row.cache:5} {row.prefilled_recompute:8.0f} {row.prefilled_shared:7.0f} "
                    f"{row.prefilled_ratio:5.1f}x {row.ms_recompute:8.1f} {row.ms_shared:7.1f} {row.time_ratio:6.1f}x "
                    f"{row.time_ratio_min}-{row.time_ratio_max}, "
                    f"CPU {row.cpu_ratio}x {row.cpu_ratio_min}-{row.cpu_ratio_max}",
                    flush=True,
                )
    result: dict[str, Any] = {"model": args.model, "choices": len(CHOICES), "rows": [asdict(row) for row in rows]}
    args.out.parent.mkdir(exist_ok=True)
    args.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
