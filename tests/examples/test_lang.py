"""Decisions of the language's examples, with a model that returns the texts of the test."""

import importlib
import sys
from pathlib import Path

import pytest

from graftlm.lang import ChoiceScore
from graftlm.lang.backend import Generation
from graftlm.lang.chat_template import find_template

EXAMPLES = Path(__file__).parents[2] / "examples" / "lang"


@pytest.fixture
def example(monkeypatch):
    """Return a function from an example's name to its module."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    before = set(sys.modules)
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if str(EXAMPLES) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


class ScriptedBackend:
    """Generates and chooses with two functions of the prompt."""

    def __init__(self, say, choose):
        self._say, self._choose = say, choose

    async def generate(self, request):
        return [Generation(self._say(request.prompt))]

    async def stream(self, request):
        yield Generation(self._say(request.prompt))

    async def score(self, prompt, choices, **options):
        chosen = self._choose(prompt, choices)
        return [ChoiceScore((1,), (-0.1 if choice == chosen else -3.0,)) for choice in choices]

    async def cache_prefix(self, prompt):
        pass

    async def chat_template(self):
        return find_template("chatml", "")

    async def flush_cache(self):
        pass


@pytest.mark.parametrize(
    ("turns", "answer", "observations"),
    [
        ([("look up", "Mia"), ("calculate", "28 + 6"), ("finish", "34")], "34", ["28 years old", "34"]),
        ([("look up", "Zoe"), ("finish", "nobody knows")], "nobody knows", ["nothing is known of Zoe"]),
        ([("calculate", "2 * 3"), ("calculate", "6 - 9"), ("calculate", "1 + 1")], None, ["6", "-3", "2"]),
    ],
)
def test_the_agent_reads_observations_until_it_answers_or_reaches_the_limit(example, turns, answer, observations):
    module = example("react_agent")
    left = iter(turns)
    argument = None

    def say(prompt):
        return argument if prompt.endswith("[") else " so"

    def choose(prompt, choices):
        nonlocal argument
        tool, argument = next(left)
        assert tool in choices
        return tool

    state = module.agent.run("How old?", backend=ScriptedBackend(say, choose))
    assert state.ret_value == answer
    own = state.text().removeprefix(module.EXAMPLES)
    assert [line.removeprefix("Observation: ") for line in own.split("\n") if line.startswith("Obs")] == observations


def test_the_agent_must_use_a_tool_first(example):
    module = example("react_agent")
    offered = []

    def choose(prompt, choices):
        offered.append(list(choices))
        return choices[-1]

    module.agent.run("How old?", backend=ScriptedBackend(lambda prompt: "Mia", choose))
    assert offered == [["calculate", "look up"], list(module.TOOLS)]


def test_the_tree_continues_from_the_best_thoughts(example):
    module = example("tree_of_thought")
    num_asked = 0

    def say(prompt):
        nonlocal num_asked
        num_asked += 1
        return "good" if prompt.endswith(module.WAYS[1]) else "bad"

    def choose(prompt, choices):
        last = prompt.rpartition("What is the next step?")[2]
        return "sure" if "good" in last else "maybe" if module.WAYS[2] in last else "impossible"

    solution = module.solve.run("A problem.", backend=ScriptedBackend(say, choose)).ret_value
    assert solution.thoughts == (f"{module.WAYS[1]}good.",) * 2
    assert num_asked == 3 + 2 * 3 + 1  # three thoughts, three more after the best two, one answer


@pytest.mark.parametrize(("helpful", "num_sources"), [("Oslo", 1), ("is", 3), ("nothing that is there", 1)])
def test_the_answer_uses_the_helpful_passages_or_the_first(example, helpful, num_sources):
    module = example("rag_pipeline")

    def choose(prompt, choices):
        return "yes" if helpful in prompt.rpartition("\n\n")[2] else "no"

    backend = ScriptedBackend(lambda prompt: "Oslo", choose)
    question = "What is the capital of Norway?"
    answer = module.ask.run(question, module.BM25(module.PASSAGES), backend=backend).ret_value
    assert answer.text == "Oslo"
    assert len(answer.sources) == num_sources
    assert "Norway" in answer.sources[0]


@pytest.mark.parametrize(
    ("query", "place"), [("capital of Norway", 1), ("older than Rome", 2), ("young foxes", 3), ("Peru?", 0)]
)
def test_the_retriever_finds_the_passage_with_the_rare_words(example, query, place):
    module = example("rag_pipeline")
    assert module.BM25(module.PASSAGES).best(query, 1) == [module.PASSAGES[place]]


def test_each_point_of_a_skeleton_is_written_out(example):
    module = example("skeleton_of_thought")

    def say(prompt):
        return "1. Trees cool\n2. Trees clean" if "<|im_start|>user\nWrite" not in prompt else f"says {prompt[-3:]}"

    state = module.answer.run("Why?", backend=ScriptedBackend(say, None))
    assert state.ret_value == "1. Trees cool: says l: \n2. Trees clean: says n: "
