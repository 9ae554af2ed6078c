"""The beginning and the failures of OpenAI's streams, tested with OpenAI's own client."""

import json

import httpx2
import openai
import pytest
from pydantic import BaseModel

CHAT = [{"role": "user", "content": "What is 2 plus 2?"}]
LONG = {"max_tokens": 1500, "extra_body": {"ignore_eos": True, "timeout_s": 0.4}}
AT_ONCE = {"max_tokens": 5, "extra_body": {"timeout_s": 1e-6}}


class Sum(BaseModel):
    total: int


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as it:
        yield it


def stream(client, route, **arguments):
    if route == "chat":
        return client.chat.completions.create(model="demo", messages=CHAT, stream=True, **arguments)
    return client.completions.create(model="demo", prompt=["What is", "Tell me"], stream=True, **arguments)


@pytest.mark.parametrize("route", ["chat", "completions"])
def test_a_failure_before_the_first_token_has_a_status_after_which_clients_retry(client, route):
    with pytest.raises(openai.APIStatusError, match="timed out") as caught:
        stream(client, route, **AT_ONCE)
    assert caught.value.status_code == 408
    assert caught.value.type == "timeout_error"


@pytest.mark.parametrize("route", ["chat", "completions"])
def test_a_failure_after_the_first_token_is_raised_within_the_stream(client, route):
    chunks = stream(client, route, **LONG)
    assert next(chunks).choices
    with pytest.raises(openai.APIError, match="timed out"):
        list(chunks)


@pytest.mark.parametrize("n", [1, 3])
def test_every_answer_has_one_opening_chunk_before_its_text(client, n):
    deltas = [[] for _ in range(n)]
    for chunk in stream(client, "chat", n=n, max_tokens=5):
        (choice,) = chunk.choices
        deltas[choice.index].append(choice)
    for choices in deltas:
        assert choices[0].delta.role == "assistant"
        assert choices[0].delta.content == ""
        assert all(choice.delta.role is None for choice in choices[1:])
        assert all(choice.delta.content for choice in choices[1:-1])
        assert choices[-1].finish_reason


def test_the_stream_helper_joins_an_answer(client):
    with client.chat.completions.stream(model="demo", messages=CHAT, temperature=0, logprobs=True) as events:
        texts = [event.delta for event in events if event.type == "content.delta"]
        answer = events.get_final_completion()
    assert "".join(texts) == answer.choices[0].message.content == "2 + 2 = 4."
    assert len(answer.choices[0].logprobs.content) == 8


def test_the_stream_helper_parses_an_answer(client):
    with client.chat.completions.stream(model="demo", messages=CHAT, temperature=0, response_format=Sum) as events:
        events.until_done()
        assert isinstance(events.get_final_completion().choices[0].message.parsed, Sum)


async def test_a_stream_can_be_closed_early_and_the_client_used_again(server):
    async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        for _ in range(3):
            answer = await client.chat.completions.create(model="demo", messages=CHAT, stream=True)
            async for _ in answer:
                await answer.close()
                break
        answer = await client.chat.completions.create(model="demo", messages=CHAT, temperature=0)
    assert answer.choices[0].message.content == "2 + 2 = 4."


def test_events_follow_the_protocol(server):
    body = {"messages": CHAT, "stream": True, "stream_options": {"include_usage": True}, "temperature": 0}
    answer = httpx2.post(server.url + "/v1/chat/completions", json=body, timeout=60)
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["cache-control"] == "no-store"
    *events, done, end = answer.text.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    documents = [json.loads(event.removeprefix("data: ")) for event in events]
    assert all(event.startswith('data: {"id":') for event in events)
    assert {document["object"] for document in documents} == {"chat.completion.chunk"}
    assert all("usage" in document for document in documents)
    assert documents[-1]["choices"] == []
    reasons = [document["choices"][0]["finish_reason"] for document in documents[:-1]]
    assert reasons == [None] * (len(reasons) - 1) + ["stop"]
