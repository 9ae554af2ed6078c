"""Reasoning in chats, of a model that is made to think by its chat template."""

import json
import shutil

import openai
import pytest

from graftlm.demo import demo_checkpoint
from graftlm.testing.server_process import ServerProcess

CHAT = [{"role": "user", "content": "What is 2 plus 2?"}]


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    """Talk to the demo model, whose template here opens the reasoning."""
    folder = tmp_path_factory.mktemp("thinking") / "demo"
    shutil.copytree(demo_checkpoint(), folder)
    file = folder / "tokenizer_config.json"
    settings = json.loads(file.read_text())
    settings["chat_template"] += "{% if add_generation_prompt %}{{ '<think>\n' }}{% endif %}"
    file.write_text(json.dumps(settings))
    config = {"model": str(folder), "memory": {"kv_tokens": 8192}, "server": {"served_model_name": "demo"}}
    with (
        ServerProcess(config, environment={"OMP_NUM_THREADS": "1"}) as server,
        openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as it,
    ):
        yield it


def ask(client, **fields):
    return client.chat.completions.create(model="demo", messages=CHAT, temperature=0, max_tokens=40, **fields)


def test_reasoning_is_told_apart_whole_and_streamed(client):
    message = ask(client).choices[0].message
    assert message.reasoning_content
    assert message.content is None
    deltas = [chunk.choices[0].delta for chunk in ask(client, stream=True)]
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == message.reasoning_content
    assert not any(delta.content for delta in deltas)


def test_reasoning_stays_in_the_content_when_asked_for(client):
    message = ask(client, extra_body={"separate_reasoning": False}).choices[0].message
    assert message.content
    assert not hasattr(message, "reasoning_content")


@pytest.mark.parametrize(
    "fields", [{"choice": ["yes", "no"]}, {"regex": "yes|no"}, {"json_schema": {"enum": ["yes", "no"]}}]
)
def test_a_grammar_waits_for_the_end_of_the_reasoning(client, fields):
    message = ask(client, extra_body={"min_tokens": 20} | fields).choices[0].message
    assert message.reasoning_content
    assert message.content is None


def test_a_grammar_that_cannot_wait_is_refused_unless_it_may_hold_the_whole_output(client):
    with pytest.raises(openai.BadRequestError, match="separate_reasoning") as caught:
        ask(client, extra_body={"ebnf": 'root ::= "yes"'})
    assert caught.value.param == "ebnf"
    answer = ask(client, extra_body={"ebnf": 'root ::= "yes"', "separate_reasoning": False})
    assert answer.choices[0].message.content == "yes"
