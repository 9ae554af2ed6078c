"""Reasoning is separated from the answer on every backend."""

import pytest

from graftlm import OpenAI, assistant, function, gen, separate_reasoning, user
from graftlm.errors import ProgramError, RequestError
from graftlm.lang import Generation
from graftlm.testing.scripted_api import ScriptedApi, ScriptedModel

THOUGHT = "<think>\nTwo and two.\n</think>\n\nFour."


@function
def ask(s, model_type="qwen3", **sampling):
    s += user("2 + 2?") + assistant(separate_reasoning(gen("answer", **sampling), model_type=model_type))
    s += user("Sure?")


class Saying:
    """A backend that generates a given text, in small pieces if it streams."""

    def __init__(self, text, template):
        self.text = text
        self.template = template

    async def generate(self, request):
        return [Generation(self.text, {"finish_reason": {"type": "stop"}})] * (request.sampling.n or 1)

    async def stream(self, request):
        for end in range(3, len(self.text), 3):
            yield Generation(self.text[:end], {"finish_reason": None})
        yield Generation(self.text, {"finish_reason": {"type": "stop"}})

    async def score(self, prompt, choices, *, unconditional, messages=()): ...
    async def cache_prefix(self, prompt): ...
    async def flush_cache(self): ...

    async def chat_template(self):
        return self.template


@pytest.fixture
def saying(in_process):
    """Return a function from a text to a backend that generates it."""
    from graftlm.lang.chat_template import find_template

    return lambda text: Saying(text, find_template("chatml", "any"))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("model_type", "text", "reasoning", "answer"),
    [
        ("qwen3", THOUGHT, "Two and two.", "Four."),
        ("think", THOUGHT, "Two and two.", "Four."),
        ("deepseek-r1", THOUGHT.removeprefix("<think>"), "Two and two.", "Four."),
        ("qwen3", "Four.", "", "Four."),
        ("none", THOUGHT, "", THOUGHT),
        ("qwen3", "<think>\nTwo and", "Two and", ""),
    ],
)
def test_reasoning_is_separated_from_the_answer(model_type, text, reasoning, answer, stream, saying):
    state = ask.run(model_type=model_type, backend=saying(text), stream=stream)
    assert state["answer"] == answer
    assert state["answer_reasoning_content"] == reasoning
    assert "".join(state.text_iter("answer_reasoning_content")) == reasoning
    assert state.messages()[1] == {"role": "assistant", "content": answer}
    assert state.get_meta_info("answer")["reasoning_content"] == reasoning


def test_each_of_several_answers_has_its_own_reasoning(saying):
    state = ask.run(n=2, backend=saying(THOUGHT))
    assert state["answer"] == ["Four."] * 2
    assert state["answer_reasoning_content"] == ["Two and two."] * 2


def test_an_answer_without_reasoning_is_the_same_on_every_backend(backend):
    with_it = ask.run(backend=backend, temperature=0, max_tokens=8)
    plain = function(lambda s: s.__iadd__(user("2 + 2?") + assistant(gen("answer")))).run(
        backend=backend, temperature=0, max_tokens=8
    )
    assert with_it["answer"] == plain["answer"] != ""
    assert with_it["answer_reasoning_content"] == ""


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_endpoint_may_separate_the_reasoning_itself(stream):
    with (
        ScriptedApi(ScriptedModel(lambda prompt: "Four.", reasons=lambda prompt: "Two and two.")) as api,
        OpenAI("scripted", base_url=api.url) as backend,
    ):
        state = ask.run(backend=backend, stream=stream)
        assert (state["answer_reasoning_content"], state["answer"]) == ("Two and two.", "Four.")


def test_a_failed_gen_also_fails_its_reasoning(saying):
    state = ask.run(backend=saying(THOUGHT), max_tokens="many", stream=True, regex="a", dtype=int)
    with pytest.raises(ProgramError):
        state["answer_reasoning_content"]


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: separate_reasoning(gen("a"), model_type="gpt"), "model_type must be one of deepseek-r1"),
        (lambda: separate_reasoning("text", model_type="qwen3"), "with a gen"),
    ],
)
def test_invalid_arguments_are_refused_at_once(make, says):
    with pytest.raises(RequestError, match=says):
        make()
