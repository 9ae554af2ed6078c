"""Solve a problem with a tree of thoughts: generate several next steps, judge them, and continue from the best ones.

This is the method of https://arxiv.org/abs/2305.10601. A thought is a fork of its parent's state, so the prefix cache
contains the same tree: the common prefix of two thoughts is computed once.
"""

from dataclasses import dataclass

from example_backend import example_backend

from graftlm import ProgramState, assistant, function, gen, select, system, user

PROBLEM = "Ana has 12 apples, Ben has 7 more than Ana, and they give 5 away. How many are left?"
WAYS = ("First, ", "Instead of that, ", "To be sure, ")
VALUES = {"sure": 2, "maybe": 1, "impossible": 0}


@dataclass(frozen=True, slots=True)
class Solution:
    """An answer, and the thoughts that led to it."""

    thoughts: tuple[str, ...]
    answer: str


class Thought:
    """A node of the tree. Its text and value are generated in the background; reading them waits for the result."""

    def __init__(self, state: ProgramState, path: tuple["Thought", ...], way: str) -> None:
        state += user("What is the next step?")
        state += assistant(way + gen("step", max_tokens=24, stop=[".", "\n"]))
        (judge,) = state.fork()  # a fork, so that the verdict is not part of later prompts
        judge += user("Does this lead to the answer? Say sure, maybe or impossible.")
        judge += assistant(select("value", list(VALUES)))
        self.state, self.path, self._way, self._judge = state, (*path, self), way, judge

    @property
    def text(self) -> str:
        """Text of the thought."""
        return f"{self._way}{self.state['step']}."

    @property
    def value(self) -> tuple[int, float]:
        """Rank of the verdict, and its log-probability; higher is better."""
        return VALUES[self._judge["value"]], max(self._judge.get_meta_info("value")["normalized_prompt_logprobs"])


@function
def solve(s: ProgramState, problem: str, depth: int = 2, num_kept: int = 2) -> Solution:
    """Return the answer after the best path of `depth` thoughts; `num_kept` paths of each depth are continued."""
    s += system("You solve problems in small steps.")
    s += user(problem)
    s += assistant("Let us think.")
    kept = [Thought(state, (), way) for state, way in zip(s.fork(len(WAYS)), WAYS, strict=True)]
    for _ in range(depth - 1):
        best = sorted(kept, key=lambda thought: thought.value, reverse=True)[:num_kept]
        kept = [
            Thought(state, thought.path, way)
            for thought in best
            for state, way in zip(thought.state.fork(len(WAYS)), WAYS, strict=True)
        ]
    end = max(kept, key=lambda thought: thought.value)
    end.state += user("So what is the answer?")
    end.state += assistant(gen("answer", max_tokens=16, stop="\n"))
    return Solution(tuple([thought.text for thought in end.path]), end.state["answer"])


def main() -> None:
    """Solve one problem."""
    with example_backend(__doc__):
        solution = solve.run(PROBLEM, temperature=0).ret_value
        for thought in solution.thoughts:
            print(f"- {thought}")
        print(solution.answer)


if __name__ == "__main__":
    main()
