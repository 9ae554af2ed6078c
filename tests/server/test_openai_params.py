"""The sampling parameters of the fields of OpenAI's requests."""

import pytest

from graftlm.server.openai.params import chat_params, completion_params
from graftlm.server.openai.requests import ChatRequest, CompletionRequest
from graftlm.types import SamplingParams

#: (fields of the request, sampling parameters)
MEANINGS = [
    ({"top_k": 1}, {"top_k": 1}),
    ({"top_k": 7}, {"top_k": 7}),
    ({"top_k": 0}, {}),
    ({"top_k": -1}, {}),
    ({"top_k": None}, {}),
    ({"top_p": 0.5}, {"top_p": 0.5}),
    ({"top_p": 0}, {"top_p": 1e-9}),
    ({"top_p": None}, {}),
    ({"min_p": 0.25}, {"min_p": 0.25}),
    ({"temperature": 0}, {"temperature": 0.0}),
    ({"temperature": 1.5}, {"temperature": 1.5}),
    ({"seed": 0}, {"seed": 0}),
    ({"seed": 2**63 - 1}, {"seed": 2**63 - 1}),
    ({"seed": -1}, {"seed": 2**63 - 1}),
    ({"frequency_penalty": -2}, {"frequency_penalty": -2.0}),
    ({"presence_penalty": 0.5}, {"presence_penalty": 0.5}),
    ({"repetition_penalty": 2}, {"repetition_penalty": 2.0}),
    ({"min_tokens": 1}, {"min_tokens": 1}),
    ({"stop": "a"}, {"stop": "a"}),
    ({"stop_token_ids": [3]}, {"stop_token_ids": [3]}),
    ({"include_stop_str_in_output": True}, {"include_stop": True}),
    ({"ignore_eos": True}, {"ignore_eos": True}),
    ({"skip_special_tokens": False}, {"skip_special_tokens": False}),
    ({"logit_bias": {"5": -1}}, {"logit_bias": {5: -1.0}}),
    ({"n": 1}, {}),
    ({"n": 3}, {"n": 3}),
]


@pytest.mark.parametrize(("fields", "meaning"), MEANINGS)
def test_fields_of_chats_and_completions_give_these_sampling_parameters(fields, meaning):
    completion = completion_params(CompletionRequest(prompt="a", max_tokens=9, **fields))
    chat = chat_params(ChatRequest(messages=[{"role": "user", "content": "a"}], max_tokens=9, **fields))
    assert completion == chat == SamplingParams(max_tokens=9, **meaning)
