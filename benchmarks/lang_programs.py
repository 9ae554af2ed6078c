"""LM programs for `lang_ablation.py`, and their texts, which have fixed lengths."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from graftlm import ProgramState, assistant, function, gen, system, user
from graftlm.lang import Program

__all__ = ["WORKLOADS", "Workload"]

WORDS = (
    "river", "stone", "garden", "window", "morning", "letter", "bridge", "yellow", "mountain", "kitchen", "summer",
    "quiet", "market", "winter", "number", "island", "paper", "forest", "silver", "corner", "animal", "village",
)  # fmt: skip
DIMENSIONS = ("clarity", "style", "evidence", "order", "length", "courage")


@function
def think(s: ProgramState, instruction: str, problem: str) -> None:
    """Generate three thoughts after each thought, three levels deep."""
    s += system(instruction)
    s += user(problem)
    level = [s]
    for _ in range(3):
        level = [fork for state in level for fork in state.fork(3)]
        for i, state in enumerate(level):
            state += user(f"Think on, way {i % 3 + 1}.")
            state += assistant(gen("thought", max_tokens=10))
    for state in level:
        state.sync()


@function
def judge(s: ProgramState, rubric: str, essay: str) -> None:
    """Judge an essay by each dimension, and then the whole essay."""
    s += system(rubric)
    s += user(essay)
    forks = s.fork(len(DIMENSIONS))
    forks += [user(f"Judge the {dimension}.") for dimension in DIMENSIONS]
    forks += assistant(gen("judgment", max_tokens=12))
    judgments = " ".join([fork["judgment"] for fork in forks])
    s += user(f"What is your verdict? {judgments}")
    s += assistant(gen("verdict", max_tokens=16))


@function
def answer(s: ProgramState, examples: str, question: str) -> None:
    """Answer one question after a task's examples."""
    s += f"{examples}\nQuestion: {question}\nAnswer:"
    s += gen("answer", max_tokens=12)


@function
def chat(s: ProgramState, instruction: str, questions: Sequence[str]) -> None:
    """Answer the questions one after the other."""
    s += system(instruction)
    for question in questions:
        s += user(question)
        s += assistant(gen("answer", max_tokens=20))


@dataclass(frozen=True, slots=True)
class Workload:
    """A program, and a function that returns the arguments of its runs for a random generator and a scale."""

    program: Program
    draw: Callable[[random.Random, float], list[dict[str, Any]]]


def text(rng: random.Random, num_words: int) -> str:
    return " ".join(rng.choices(WORDS, k=num_words)).capitalize() + "."


def count(full: int, scale: float) -> int:
    return max(1, round(full * scale))


def draw_problems(rng: random.Random, scale: float) -> list[dict[str, Any]]:
    instruction = text(rng, 80)
    return [{"instruction": instruction, "problem": text(rng, 60)} for _ in range(count(4, scale))]


def draw_essays(rng: random.Random, scale: float) -> list[dict[str, Any]]:
    rubric = text(rng, 60)
    return [{"rubric": rubric, "essay": text(rng, 200)} for _ in range(count(8, scale))]


def draw_questions(rng: random.Random, scale: float) -> list[dict[str, Any]]:
    tasks = [text(rng, 200) for _ in range(count(8, scale))]
    runs = [{"examples": task, "question": text(rng, 12)} for task in tasks for _ in range(8)]
    return rng.sample(runs, len(runs))


def draw_chats(rng: random.Random, scale: float) -> list[dict[str, Any]]:
    instructions = [text(rng, 80) for _ in range(2)]
    return [
        {"instruction": instructions[i % 2], "questions": [text(rng, 30) for _ in range(4)]}
        for i in range(count(12, scale))
    ]


WORKLOADS = {
    "tree of thought": Workload(think, draw_problems),
    "LLM judge": Workload(judge, draw_essays),
    "few-shot": Workload(answer, draw_questions),
    "multi-turn": Workload(chat, draw_chats),
}
