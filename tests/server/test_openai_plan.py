"""How chats are answered: where the grammar begins."""

import asyncio
import json
import re

import pytest

from graftlm.chat_formats import ChatFormats
from graftlm.errors import RequestError
from graftlm.server.openai.plan import plan_answer
from graftlm.server.openai.requests import ChatRequest
from graftlm_chat.think import ThinkFormat


class Manager:
    """What a plan asks of the tokenizer manager; the prompt ends as one says."""

    chat_formats = ChatFormats(reasoning=ThinkFormat())

    def __init__(self, prompt_end):
        self.prompt_end = prompt_end

    async def encode_chat(self, messages, **template_args):
        return [1, 2]

    async def decode(self, token_ids, *, skip_special_tokens):
        return self.prompt_end


def plan(prompt_end, **fields):
    body = ChatRequest(messages=[{"role": "user", "content": "Hi"}], **fields)
    return asyncio.run(plan_answer(body, Manager(prompt_end)))


CHOICES = ["a|b", "yes", "[x]", "C:\\\n", "é (1)", ""]


def test_a_choice_follows_the_reasoning_that_the_prompt_opens():
    params = plan("<think>\n", choice=CHOICES).params
    (structure,) = params.structural_tag["structures"]
    assert params.choice is None
    assert (structure["begin"], structure["end"]) == ("</think>\n\n", "")
    assert all(re.fullmatch(structure["regex"], choice) for choice in CHOICES)
    assert not any(re.fullmatch(structure["regex"], other) for other in ("a", "b", "x", "yes ", "C:"))


def test_a_choice_is_the_whole_output_where_no_reasoning_is_open():
    planned = plan("assistant\n", choice=CHOICES)
    assert (planned.params.choice, planned.params.structural_tag) == (tuple(CHOICES), None)
    assert planned.reasoning is None


@pytest.mark.parametrize(("at_least_one", "has_reasoning"), [(False, True), (None, True), (True, False)])
@pytest.mark.parametrize("spell", [json.dumps, dict])
def test_a_structure_that_has_to_come_first_leaves_no_room_for_reasoning(spell, at_least_one, has_reasoning):
    structure = {"begin": "<n>", "schema": {"type": "integer"}, "end": "</n>"}
    tag = {"triggers": ["<n>"], "structures": [structure], "at_least_one": at_least_one}
    assert (plan("<think>", structural_tag=spell(tag)).reasoning is not None) == has_reasoning


def test_a_schema_that_is_no_json_is_refused():
    with pytest.raises(RequestError, match=r"^json_schema: not JSON: "):
        plan("<think>", json_schema="{")
