"""Above temperature 0, a text is sampled only once with speculation, so its probability is unchanged."""

import random
from collections import Counter

import pytest

from graftlm import OpenAI, assistant, function, gen, user
from graftlm.errors import ProgramError, RequestFailedError
from graftlm.testing.scripted_api import ScriptedApi, ScriptedModel

SHORT, LONG = "A\nx y z w\nA\n", "B B B B B B B B\nx\n"


def write_twice(s):
    s += "Q:" + gen("a", stop="\n", max_tokens=4) + "\nQ:" + gen("b", stop="\n", max_tokens=4)


def write_message(s):
    s += user("Q") + assistant(gen("a", stop="\n", max_tokens=4))


def draws(write, num_tokens, *, is_chat, temperature):
    """Return how often each text was sampled in 60 runs with a model that flips a coin, and the number of calls."""
    coin = random.Random(1)
    program = function(write, num_api_spec_tokens=num_tokens)
    with (
        ScriptedApi(ScriptedModel(lambda prompt: coin.choice([SHORT, LONG]))) as api,
        OpenAI("scripted", base_url=api.url, is_chat=is_chat) as backend,
    ):
        counts = Counter(program.run(backend=backend, temperature=temperature).text() for _ in range(60))
    return counts, len(api.bodies)


@pytest.mark.parametrize("temperature", [None, 1.0])
@pytest.mark.parametrize(("write", "is_chat"), [(write_twice, False), (write_message, True)])
def test_long_texts_are_sampled_as_often_as_without_speculation(write, is_chat, temperature):
    alone = draws(write, None, is_chat=is_chat, temperature=temperature)
    ahead = draws(write, 16, is_chat=is_chat, temperature=temperature)
    assert ahead == alone
    assert len(alone[0]) == (2 if is_chat else 4)


@pytest.mark.parametrize(
    ("message", "fields"),
    [
        pytest.param("Name: Ana\nJob: cook\n", {"name": " Ana", "job": " cook"}, id="all of it"),
        pytest.param("Name: Ana\nJob: " + "cook " * 40, None, id="a field that is cut"),
        pytest.param("Name: " + "Ana " * 40 + "\nJob: cook\n", None, id="a first field that is cut"),
        pytest.param("Name: Ana\nJob:" + " cook" * 10 + "\n", None, id="more than max_tokens"),
    ],
)
def test_a_message_with_several_fields_is_sampled_once(message, fields):
    def write(s):
        s += user("Who?") + assistant("Name:" + gen("name", stop="\n") + "\nJob:" + gen("job", stop="\n", max_tokens=6))

    program = function(write, num_api_spec_tokens=30)
    with (
        ScriptedApi(ScriptedModel(lambda prompt: message)) as api,
        OpenAI("scripted", base_url=api.url, is_chat=True) as backend,
    ):
        if fields is None:
            with pytest.raises(ProgramError, match="sampling the text again would favour") as caught:
                program.run(backend=backend, temperature=1.0, max_tokens=20).text()
            assert isinstance(caught.value.__cause__, RequestFailedError)
        else:
            state = program.run(backend=backend, temperature=1.0, max_tokens=20)
            assert {name: state[name] for name in fields} == fields
    assert len(api.bodies) == 1
