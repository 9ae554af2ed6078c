"""Measures the demo model's EAGLE-3 head on held-out questions that are drawn now.

`make train-draft` runs this script after the training. It prints the acceptance of the head's drafts, the tokens per
step if each step verified a draft, and the speed with and without the head in turns. The acceptance does not depend on
the speed of the machine. The speed does: a step of the demo model takes less than a millisecond, and so does a step of
the head, so few drafts save time.
"""

import argparse
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from graftlm import Engine, Provider, SamplingParams, hookimpl
from graftlm.contracts import Draft, Drafter, DrafterContext, DraftRequest
from graftlm.demo.corpus import held_out_questions
from graftlm_speculation import provide_drafters
from graftlm_speculation.options import Eagle3Options

PARAMS = SamplingParams(temperature=0, max_tokens=120)


class Listening(Drafter):
    """A drafter that is called before every step, and whose drafts are stored.

    Attributes:
        drafts: token ids of a request -> its draft.
    """

    drafts_ahead = False

    def __init__(self, inner: Drafter) -> None:
        self.drafts: dict[tuple[int, ...], list[int]] = {}
        self._inner = inner

    @property
    def num_page_tokens(self) -> int:
        """That of the wrapped drafter."""
        return self._inner.num_page_tokens

    def propose(self, requests: Sequence[DraftRequest]) -> Sequence[Draft | None]:
        """Return and store the drafts of the wrapped drafter."""
        texts = [tuple(request.token_ids.tolist()) for request in requests]
        drafts = self._inner.propose(requests)
        for text, draft in zip(texts, drafts, strict=True):
            if draft is not None:
                self.drafts[text] = draft.token_ids.tolist()
        return drafts


class Plugin:
    """A plugin that provides `listening`: the drafter `eagle3` as a `Listening`."""

    def __init__(self) -> None:
        self.drafter: Listening | None = None

    @hookimpl
    def provide_drafters(self) -> list[Provider[Drafter]]:
        """Return the provider of `listening`."""
        (eagle3,) = [provider for provider in provide_drafters() if provider.name == "eagle3"]

        def create(options: Eagle3Options, context: DrafterContext) -> Drafter:
            self.drafter = Listening(eagle3.create(options, context))
            return self.drafter

        summary = "EAGLE-3, called for every step"
        return [Provider(name="listening", summary=summary, api_version=1, create=create, options=Eagle3Options)]


@dataclass
class Acceptance:
    """Counts of drafts, as if each step verified a whole draft.

    Attributes:
        tokens, steps: generated tokens, and steps that generated them; without prompts and their first tokens.
        drafted, accepted: numbers of drafts with a token at each place, and of those whose tokens up to it were right.
    """

    tokens: int = 0
    steps: int = 0
    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)

    def add(self, prompt: Sequence[int], output: Sequence[int], drafts: dict[tuple[int, ...], list[int]]) -> None:
        """Add an answer: follow its steps from its second token on. Steps without a draft are not counted."""
        done = 1
        while done < len(output):
            found = drafts.get((*prompt, *output[:done]))
            if found is None:
                done += 1
                continue
            draft = found[: len(output) - done - 1]
            right = next((i for i, token in enumerate(draft) if token != output[done + i]), len(draft))
            for counts, number in ((self.drafted, len(draft)), (self.accepted, right)):
                counts += [0] * (number - len(counts))
                for i in range(number):
                    counts[i] += 1
            self.steps += 1
            self.tokens += right + 1
            done += right + 1

    def lines(self) -> list[str]:
        """Return the figures as text."""
        shares = [a / d for a, d in zip(self.accepted + [0] * len(self.drafted), self.drafted, strict=False)]
        return [
            f"accepted up to each place of a draft: {', '.join(f'{share:.1%}' for share in shares)}",
            f"accepted of all drafted tokens: {sum(self.accepted) / sum(self.drafted):.1%}",
            f"tokens per step: {self.tokens / self.steps:.2f}",
        ]


def measure_acceptance(head: dict[str, object], questions: Sequence[str]) -> Acceptance:
    """Ask the questions, and compare each draft of the head with the answer."""
    plugin, found = Plugin(), Acceptance()
    speculation = {"drafter": {"name": "listening", "options": head}}
    with Engine(model="demo", speculation=speculation, scheduling={"overlap": False}, plugins=[plugin]) as engine:
        for text in questions:
            (output,) = engine.generate([[{"role": "user", "content": text}]], PARAMS)
            assert plugin.drafter is not None
            found.add(output.prompt_token_ids, output.token_ids, plugin.drafter.drafts)
    return found


def compare_speed(head: dict[str, object], questions: Sequence[str], rounds: int) -> list[str]:
    """Ask the questions one at a time, in turns without and with the head; return lines with the speeds."""
    ways = {"without the head": None, "with the head": {"drafter": {"name": "eagle3", "options": head}}}
    engines = {name: Engine(model="demo", speculation=speculation) for name, speculation in ways.items()}
    seconds, tokens = dict.fromkeys(ways, 0.0), dict.fromkeys(ways, 0)
    try:
        for i in range(rounds + 1):  # the first round compiles and records
            for name, engine in engines.items():
                start_s = time.perf_counter()
                counts = [
                    len(engine.generate([[{"role": "user", "content": text}]], PARAMS)[0].token_ids)
                    for text in questions
                ]
                if i:
                    seconds[name] += time.perf_counter() - start_s
                    tokens[name] += sum(counts)
        drafted, accepted = engines["with the head"].stats().drafts["eagle3"]
    finally:
        for engine in engines.values():
            engine.close()
    lines = [f"{name}: {tokens[name] / seconds[name]:.0f} tokens/s" for name in ways]
    return [*lines, f"the engine verified {drafted} drafted tokens, of which it accepted {accepted}"]


def main() -> None:
    """Draw questions, ask them, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--head", default="demo-eagle3", help="folder of the head")
    parser.add_argument("--seed", type=int, default=secrets.randbelow(10**9), help="seed of the questions")
    parser.add_argument("--per-form", type=int, default=8, help="number of questions of each form")
    parser.add_argument("--rounds", type=int, default=2, help="rounds of the comparison of speeds; 0: none")
    parser.add_argument("--max-drafts", type=int, default=4)
    options = parser.parse_args()
    questions = [question.turns[-1][0] for question in held_out_questions(options.seed, options.per_form)]
    print(f"{len(questions)} held-out questions, seed {options.seed}")
    head = {"path": options.head, "max_drafts": options.max_drafts}
    print(*measure_acceptance(head, questions).lines(), sep="\n")
    if options.rounds:
        print(*compare_speed(head, questions[::4], options.rounds), sep="\n")


if __name__ == "__main__":
    main()
