"""Judge an essay by several dimensions in parallel, and summarize the judgments in JSON.

This is the running example of the SGLang paper (https://arxiv.org/abs/2312.07104, figure 2). A `select` checks the
essay's topic and can end the program early. The forks judge one dimension each; their common prefix is computed once.
A regular expression constrains the verdict to valid JSON.
"""

import json
from typing import Any

from example_backend import example_backend

from graftlm import ProgramState, assistant, function, gen, select, system, user

DIMENSIONS = ("Clarity", "Originality", "Evidence")
VERDICT = r'\{"summary": "[\w ]{1,60}\.", "grade": "[ABCD][+-]?"\}'
ESSAY = (
    "Cities need trees. A tree cools the street below it, it keeps the rain from the drains, and people who see one "
    "from their window sleep better. A city that plants today thanks itself for a hundred years."
)


@function
def judge(s: ProgramState, essay: str, topic: str) -> dict[str, Any] | None:
    """Return the verdict on an essay, or None if the essay is not about the topic."""
    s += system(f"You judge essays about {topic}.")
    s += user(f"Here is an essay.\n\n{essay}")
    s += assistant("I have read it.")
    s += user("Is the essay about the topic? Answer yes or no.")
    s += assistant(select("related", ["yes", "no"]))
    if s["related"] == "no":
        return None

    forks = s.fork(len(DIMENSIONS))
    for fork, dimension in zip(forks, DIMENSIONS, strict=True):
        fork += user(f"Judge the essay by its {dimension.lower()}, in one sentence.")
        fork += assistant(f"{dimension}: " + gen("judgment", max_tokens=24, stop=[".", "\n"]))
    judgments = "\n".join(f"{d}: {fork['judgment']}" for fork, d in zip(forks, DIMENSIONS, strict=True))

    s += user(f"Sum these judgments up, with a grade.\n{judgments}")
    s += assistant(gen("verdict", max_tokens=96, regex=VERDICT))
    verdict: dict[str, Any] = json.loads(s["verdict"])
    return verdict


def main() -> None:
    """Judge one essay."""
    with example_backend(__doc__):
        state = judge.run(ESSAY, "trees in cities", temperature=0)
        print(state.text())
        print(state.ret_value)


if __name__ == "__main__":
    main()
