"""OpenAI's API, tested with OpenAI's own client and a real server."""

import asyncio
import base64
import json
import re

import numpy as np
import openai
import pytest
import requests

from graftlm import Engine, SamplingParams

CHAT = [{"role": "user", "content": "Which day comes after Thursday?"}]
SCHEMA = {
    "type": "object",
    "properties": {"sum": {"type": "integer"}, "name": {"enum": ["a", "b"]}},
    "required": ["sum", "name"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def engine():
    with Engine(model="demo", memory={"kv_tokens": 8192}) as it:
        yield it


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as it:
        yield it


@pytest.fixture
async def async_client(server):
    async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as it:
        yield it


def post(server, path, **body):
    return requests.post(server.url + path, json=body, timeout=60)


# -- chat --------------------------------------------------------------------------------------------------------------


def test_a_chat_is_answered_as_by_the_in_process_engine(client, engine):
    expected = engine.generate(CHAT, SamplingParams(temperature=0, max_tokens=40))[0]
    answer = client.chat.completions.create(model="demo", messages=CHAT, temperature=0, max_tokens=40)
    assert answer.choices[0].message.content == expected.text
    assert answer.choices[0].finish_reason == expected.finish_reason.value
    assert answer.usage.prompt_tokens == expected.usage.prompt_tokens
    assert answer.usage.completion_tokens == expected.usage.completion_tokens
    assert answer.usage.total_tokens == expected.usage.total_tokens
    assert answer.object == "chat.completion"
    assert answer.choices[0].message.role == "assistant"


def test_the_chunks_of_a_streamed_chat_join_to_the_whole_answer(client):
    whole = client.chat.completions.create(model="demo", messages=CHAT, temperature=0)
    chunks = list(
        client.chat.completions.create(
            model="demo", messages=CHAT, temperature=0, stream=True, stream_options={"include_usage": True}
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    reasons = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices]
    assert reasons[-1] == whole.choices[0].finish_reason
    assert set(reasons[:-1]) == {None}
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens == whole.usage.prompt_tokens - 1
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert len({chunk.id for chunk in chunks}) == 1


async def test_the_async_client_works_with_many_concurrent_streams(async_client):
    async def one(i):
        stream = await async_client.chat.completions.create(
            model="demo", messages=[{"role": "user", "content": f"What is {i} plus 3?"}], temperature=0, stream=True
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    answers = await asyncio.gather(*[one(i) for i in range(12)])
    assert answers[4] == "4 + 3 = 7."
    assert len(set(answers)) == 12


def test_a_second_question_reuses_the_first_ones_prefix(client):
    system = {"role": "system", "content": "You are a helpful assistant that answers in short sentences. " * 4}
    for question, least in (("What is 1 plus 1?", 0), ("What is 2 plus 1?", 50)):
        answer = client.chat.completions.create(
            model="demo", messages=[system, {"role": "user", "content": question}], max_tokens=4
        )
        assert answer.usage.prompt_tokens_details.cached_tokens >= least


def test_different_cache_salts_share_no_prefix(client):
    chat = [{"role": "user", "content": "A sentence that nobody has said before in this test session, at all."}]
    cached = []
    for salt in ("tenant-a", "tenant-b", "tenant-a"):
        answer = client.chat.completions.create(
            model="demo", messages=chat, max_tokens=1, extra_body={"cache_salt": salt}
        )
        cached.append(answer.usage.prompt_tokens_details.cached_tokens)
    assert cached[:2] == [0, 0]
    assert cached[2] > 10


def test_n_answers_of_one_seed_differ_and_are_repeatable(client):
    # without the bias, the model always gives the same answer
    bias = {str(token_id): 12 for token_id in range(400, 440)}

    def ask(**more):
        return client.chat.completions.create(
            model="demo", messages=CHAT, n=3, seed=11, temperature=2, max_tokens=12, logit_bias=bias, **more
        )

    first = [choice.message.content for choice in ask().choices]
    assert first == [choice.message.content for choice in ask().choices]
    assert len(set(first)) > 1
    streamed = ["", "", ""]
    for chunk in ask(stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert streamed == first


def test_a_negative_seed_is_valid_and_repeatable(client):
    texts = {
        client.chat.completions.create(model="demo", messages=CHAT, seed=-5, temperature=1.2, max_tokens=12)
        .choices[0]
        .message.content
        for _ in range(3)
    }
    assert len(texts) == 1


@pytest.mark.parametrize(
    ("path", "prompt"), [("/v1/chat/completions", {"messages": CHAT}), ("/v1/completions", {"prompt": "a"})]
)
def test_top_k_1_is_greedy(server, path, prompt):
    sampled, greedy = (
        post(server, path, max_tokens=16, **prompt, **fields).json()["choices"]
        for fields in ({"temperature": 2, "top_k": 1}, {"temperature": 0})
    )
    assert sampled == greedy


def test_a_stop_string_ends_an_answer_before_itself(client):
    whole = client.chat.completions.create(model="demo", messages=CHAT, temperature=0).choices[0].message.content
    stop = whole[5:8]
    choice = client.chat.completions.create(model="demo", messages=CHAT, temperature=0, stop=[stop, "zzz"]).choices[0]
    assert choice.message.content == whole[: whole.index(stop)]
    assert choice.finish_reason == "stop"
    kept = client.chat.completions.create(
        model="demo", messages=CHAT, temperature=0, stop=stop, extra_body={"include_stop_str_in_output": True}
    )
    assert kept.choices[0].message.content == whole[: whole.index(stop) + len(stop)]


@pytest.mark.parametrize("keep", [False, True])
def test_a_stop_regex_ends_an_answer(client, keep):
    whole = client.chat.completions.create(model="demo", messages=CHAT, temperature=0).choices[0].message.content
    start = whole.index(whole[5:8])
    extra = {"stop_regex": ["zz+", f"{re.escape(whole[5:7])}."], "no_stop_trim": keep}
    fields = {"model": "demo", "messages": CHAT, "temperature": 0, "extra_body": extra}
    choice = client.chat.completions.create(**fields).choices[0]
    assert choice.message.content == whole[: start + 3 if keep else start]
    assert choice.finish_reason == "stop"
    chunks = client.chat.completions.create(**fields, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == choice.message.content


def test_a_stop_regex_ends_a_completion_and_an_invalid_one_is_refused(server):
    fields = {"prompt": "One, two,", "temperature": 0, "max_tokens": 30}
    whole = post(server, "/v1/completions", **fields).json()["choices"][0]["text"]
    pattern = f"{re.escape(whole[4:6])}[^$]"
    (choice,) = post(server, "/v1/completions", stop_regex=pattern, **fields).json()["choices"]
    assert choice["text"] == whole[: re.search(pattern, whole).start()]
    refused = requests.post(server.url + "/v1/completions", json=fields | {"stop_regex": "a("}, timeout=30)
    assert refused.status_code == 400
    assert "stop_regex: 'a(' is not a regular expression" in refused.json()["error"]["message"]


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_both_names_of_the_token_limit_have_effect(client, field):
    answer = client.chat.completions.create(model="demo", messages=CHAT, temperature=0, **{field: 2})
    assert answer.usage.completion_tokens == 2
    assert answer.choices[0].finish_reason == "length"


def test_logprobs_of_a_chat_are_those_of_the_engine(client, engine):
    expected = engine.generate(CHAT, SamplingParams(temperature=0, max_tokens=6, logprobs=3))[0]
    for stream in (False, True):
        answer = client.chat.completions.create(
            model="demo", messages=CHAT, temperature=0, max_tokens=6, logprobs=True, top_logprobs=3, stream=stream
        )
        if stream:
            parts = [c.choices[0].logprobs.content for c in answer if c.choices and c.choices[0].logprobs]
            content = [entry for part in parts for entry in part]
        else:
            content = answer.choices[0].logprobs.content
        shown = expected.logprobs[:-1]  # the end token is not part of the answer
        np.testing.assert_allclose([e.logprob for e in content], [e.logprob for e in shown], atol=1e-4)
        assert all(len(entry.top_logprobs) == 3 for entry in content)
        assert all(entry.top_logprobs[0].logprob == pytest.approx(entry.logprob, abs=1e-4) for entry in content)
        joined = b"".join(bytes(entry.bytes) for entry in content).decode()
        assert joined == expected.text


def test_a_negative_logit_bias_excludes_a_token(client, engine):
    first = engine.generate(CHAT, SamplingParams(temperature=0, max_tokens=1))[0].token_ids[0]
    answer = client.chat.completions.create(
        model="demo", messages=CHAT, temperature=0, max_tokens=1, logit_bias={str(first): -100}, logprobs=True
    )
    banned = engine.tokenizer.decode([first])
    assert answer.choices[0].logprobs.content[0].token != banned


@pytest.mark.parametrize(
    "response_format",
    [
        {"type": "json_object"},
        {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}},
    ],
)
def test_an_answer_in_a_response_format_is_valid(client, response_format):
    import jsonschema

    answer = client.chat.completions.create(
        model="demo", messages=CHAT, response_format=response_format, temperature=0, max_tokens=200, seed=1
    )
    if answer.choices[0].finish_reason == "stop":
        value = json.loads(answer.choices[0].message.content)
        assert isinstance(value, dict)
        if response_format["type"] == "json_schema":
            jsonschema.validate(value, SCHEMA)
    else:
        assert response_format["type"] == "json_object"


def test_the_parse_helper_returns_a_model(client):
    from pydantic import BaseModel

    class Sum(BaseModel):
        total: int

    answer = client.chat.completions.parse(model="demo", messages=CHAT, response_format=Sum, temperature=0)
    assert isinstance(answer.choices[0].message.parsed, Sum)


def test_an_answer_can_be_sent_back_unchanged(client):
    first = client.chat.completions.create(model="demo", messages=CHAT, temperature=0)
    chat = [*CHAT, first.choices[0].message.model_dump(), {"role": "user", "content": "What is 2 plus 2?"}]
    assert client.chat.completions.create(model="demo", messages=chat, temperature=0).choices[0].message.content


def test_message_parts_and_the_role_developer_are_accepted(client, engine):
    parts = [
        {"role": "developer", "content": "Be short."},
        {"role": "user", "content": [{"type": "text", "text": "What is "}, {"type": "text", "text": "2 plus 2?"}]},
    ]
    plain = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "What is 2 plus 2?"}]
    expected = engine.generate(plain, SamplingParams(temperature=0))[0]
    answer = client.chat.completions.create(model="demo", messages=parts, temperature=0)
    assert answer.usage.prompt_tokens == expected.usage.prompt_tokens
    assert answer.choices[0].message.content == expected.text


def test_tools_with_choice_none_are_accepted(client):
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    answer = client.chat.completions.create(model="demo", messages=CHAT, tools=[tool], tool_choice="none", max_tokens=4)
    assert answer.usage.completion_tokens > 0


# -- completions -------------------------------------------------------------------------------------------------------


def test_completions_of_text_and_of_token_ids_are_those_of_the_engine(client, engine):
    params = SamplingParams(temperature=0, max_tokens=16)
    ids = engine.tokenizer.encode("The capital of France is").tolist()
    expected = engine.generate(["The capital of France is", "One, two"], params)
    for prompt in (["The capital of France is", "One, two"], [ids, engine.tokenizer.encode("One, two").tolist()]):
        answer = client.completions.create(model="demo", prompt=prompt, temperature=0)
        assert [choice.text for choice in answer.choices] == [output.text for output in expected]
        assert [choice.index for choice in answer.choices] == [0, 1]
        assert answer.usage.completion_tokens == sum(output.usage.completion_tokens for output in expected)
    assert client.completions.create(model="demo", prompt=ids, temperature=0).choices[0].text == expected[0].text


def test_streamed_completions_of_several_prompts_join_to_the_whole_answer(client):
    arguments = {"model": "demo", "prompt": ["a", "b c"], "n": 2, "seed": 3, "max_tokens": 9, "temperature": 1.1}
    whole = client.completions.create(**arguments)
    texts = [""] * 4
    reasons = [None] * 4
    for chunk in client.completions.create(**arguments, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    assert texts == [choice.text for choice in whole.choices]
    assert reasons == [choice.finish_reason for choice in whole.choices]


@pytest.mark.parametrize("stream", [False, True])
def test_echo_returns_the_prompt_first_with_its_logprobs(client, engine, stream):
    prompt = "The capital of France is"
    params = SamplingParams(temperature=0, max_tokens=4, logprobs=2, prompt_logprobs=2)
    expected = engine.generate(prompt, params)[0]
    answer = client.completions.create(
        model="demo", prompt=prompt, temperature=0, max_tokens=4, echo=True, logprobs=2, stream=stream
    )
    choices = [chunk.choices[0] for chunk in answer if chunk.choices] if stream else answer.choices
    assert "".join(choice.text for choice in choices) == prompt + expected.text
    found = [value for choice in choices for value in choice.logprobs.token_logprobs]
    wanted = [entry and entry.logprob for entry in (*expected.prompt_logprobs, *expected.logprobs)]
    assert found[0] is None
    np.testing.assert_allclose(found[1:], wanted[1:], atol=1e-3)
    tokens = [token for choice in choices for token in choice.logprobs.tokens]
    offsets = [offset for choice in choices for offset in choice.logprobs.text_offset]
    assert tokens[0] == "<|bos|>"  # it is not part of the text
    assert "".join(tokens[1:]).startswith(prompt)
    assert offsets == [sum(map(len, tokens[1:i])) for i in range(len(tokens))]


# -- other routes -----------------------------------------------------------------------------------------------------


def test_the_model_list_has_the_served_model(client):
    assert [model.id for model in client.models.list()] == ["demo"]
    assert client.models.retrieve("demo").id == "demo"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_request_may_disable_jump_forward(server, path):
    prompt = {"prompt": "x"} if path == "/v1/completions" else {"messages": CHAT}
    fields = {"regex": "[ab]{1,9}, and so it was said", "max_tokens": 40, "temperature": 0, **prompt}
    usages = [post(server, path, **fields, jump_forward=wanted).json()["usage"] for wanted in (None, False)]
    counts = [(usage.get("completion_tokens_details") or {}).get("jump_forward_tokens", 0) for usage in usages]
    assert counts[0] > counts[1] == 0


def test_embeddings_are_returned_as_floats_and_as_base64(client, server):
    answer = client.embeddings.create(model="demo", input=["a fox", "a dog", "a fox"])  # the client requests base64
    vectors = np.array([item.embedding for item in answer.data])
    assert vectors.shape[0] == 3
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    np.testing.assert_allclose(vectors[0], vectors[2], atol=1e-5)
    assert abs(vectors[0] @ vectors[1]) < 0.9999
    floats = post(server, "/v1/embeddings", input="a fox", encoding_format="float").json()["data"][0]["embedding"]
    coded = post(server, "/v1/embeddings", input="a fox", encoding_format="base64").json()["data"][0]["embedding"]
    np.testing.assert_array_equal(np.float32(floats), np.frombuffer(base64.b64decode(coded), "<f4"))
    np.testing.assert_allclose(floats, vectors[0], atol=1e-5)
    last = post(server, "/v1/embeddings", input="a fox", pooling="last").json()["data"][0]["embedding"]
    assert not np.allclose(last, floats, atol=1e-3)


def test_detokenize_is_the_inverse_of_tokenize(server, engine):
    text = "Grüße, 世界! 🎉"
    ids = post(server, "/v1/tokenize", prompt=text).json()
    assert ids["tokens"] == engine.tokenizer.encode(text).tolist()
    assert ids["count"] == len(ids["tokens"])
    both = post(server, "/v1/tokenize", prompt=[text, "a"]).json()
    assert both["tokens"] == [ids["tokens"], engine.tokenizer.encode("a").tolist()]
    assert both["count"] == [len(tokens) for tokens in both["tokens"]]
    assert post(server, "/v1/tokenize", prompt=[]).json()["tokens"] == []
    assert post(server, "/v1/detokenize", tokens=ids["tokens"]).json()["text"] == text
    chat = post(server, "/v1/tokenize", messages=CHAT).json()
    assert chat["tokens"] == engine.tokenizer.encode_chat(CHAT).tolist()


@pytest.mark.parametrize(
    ("path", "body", "status", "says"),
    [
        ("/v1/chat/completions", {}, 400, "messages"),
        ("/v1/chat/completions", {"messages": []}, 400, "messages"),
        ("/v1/chat/completions", {"messages": CHAT, "foo": 1}, 400, "foo"),
        ("/v1/chat/completions", {"messages": CHAT, "temperature": 3}, 400, "temperature"),
        ("/v1/chat/completions", {"messages": CHAT, "temperature": "hot"}, 400, "temperature"),
        ("/v1/chat/completions", {"messages": CHAT, "max_tokens": 0}, 400, "max_tokens"),
        ("/v1/chat/completions", {"messages": CHAT, "n": 0}, 400, "n"),
        ("/v1/chat/completions", {"messages": CHAT, "model": "gpt-4"}, 404, "gpt-4"),
        ("/v1/chat/completions", {"messages": [{"role": "robot", "content": "x"}]}, 400, "role"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": None}]}, 400, "content"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            400,
            "cannot use pictures",
        ),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "video_url", "video_url": {"url": "x"}}]}]},
            400,
            "messages.0.content.0: parts of type 'video_url' are not supported",
        ),
        ("/v1/chat/completions", {"messages": CHAT, "tools": [{"type": "function"}]}, 400, "tool"),
        ("/v1/chat/completions", {"messages": CHAT, "tool_choice": "required"}, 400, "tool_choice"),
        ("/v1/chat/completions", {"messages": CHAT, "top_logprobs": 2}, 400, "top_logprobs"),
        ("/v1/chat/completions", {"messages": CHAT, "audio": {"voice": "x"}}, 400, "audio"),
        ("/v1/chat/completions", {"messages": CHAT, "logit_bias": {"99999999": 1}}, 400, "logit_bias"),
        ("/v1/chat/completions", {"messages": CHAT, "chat_template_kwargs": {"chat_template": "x"}}, 400, "chat_temp"),
        (
            "/v1/chat/completions",
            {
                "messages": CHAT,
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": {"type": "array", "uniqueItems": True}},
                },
            },
            400,
            "uniqueItems",
        ),
        ("/v1/completions", {"prompt": ""}, 400, "empty"),
        ("/v1/completions", {"prompt": []}, 400, "empty"),
        ("/v1/completions", {"prompt": [[]]}, 400, "empty"),
        ("/v1/completions", {"prompt": [10**9]}, 400, "vocabulary"),
        ("/v1/completions", {"prompt": [-1]}, 400, "prompt"),
        ("/v1/completions", {"prompt": "x", "suffix": "y"}, 400, "suffix"),
        ("/v1/completions", {"prompt": "x", "best_of": 3}, 400, "best_of"),
        ("/v1/completions", {"prompt": "\ud800"}, 400, "prompt"),
        ("/v1/completions", {"prompt": [5] * 9999}, 400, "context"),
        ("/v1/completions", {"prompt": "x", "stream_options": {"include_usage": True}}, 400, "stream_options"),
        ("/v1/completions", {"prompt": "x", "regex": "(", "stream": True}, 400, "regular expression"),
        ("/v1/embeddings", {"input": []}, 400, "empty"),
        ("/v1/embeddings", {"input": "x", "dimensions": 0}, 400, "dimensions"),
        ("/v1/embeddings", {"input": "x", "dimensions": 10**6}, 400, "dimensions"),
        ("/v1/embeddings", {"input": "x", "pooling": "max"}, 400, "pooling"),
        ("/v1/tokenize", {}, 400, "prompt"),
        ("/v1/detokenize", {"tokens": [10**6]}, 400, "vocabulary"),
        ("/v1/nothing", {}, 404, "Not Found"),
    ],
)
def test_an_invalid_request_gets_openais_error_body(server, path, body, status, says):
    answer = requests.post(
        server.url + path, data=json.dumps(body), headers={"Content-Type": "application/json"}, timeout=30
    )
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert says in error["message"]


def test_an_unknown_argument_has_openais_error_message(client):
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="demo", messages=CHAT, extra_body={"foo": 1})
    assert caught.value.code == "unknown_parameter"
    assert caught.value.param == "foo"
    assert "Unrecognized request argument supplied: foo" in str(caught.value)


@pytest.mark.parametrize("data", ["", "{", "nonsense", "[1]", "null", '{"messages": NaN}', "[" * 100_000, "1" * 5000])
def test_a_body_that_is_no_json_object_is_a_400(server, data):
    headers = {"Content-Type": "application/json"}
    answer = requests.post(server.url + "/v1/chat/completions", data=data, headers=headers, timeout=30)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["message"]


def test_closing_a_connection_frees_the_requests_memory(server):
    body = {"prompt": "x", "max_tokens": 900, "ignore_eos": True}
    with requests.post(server.url + "/v1/completions", json=body | {"stream": True}, timeout=30, stream=True) as answer:
        next(answer.iter_lines())
    wait_until_idle(server)
    with pytest.raises(requests.exceptions.ReadTimeout):
        requests.post(server.url + "/v1/completions", json=body, timeout=0.3)
    wait_until_idle(server)


def wait_until_idle(server):
    from graftlm.testing.server_process import wait_until

    def idle():
        (load,) = requests.get(server.url + "/get_load", timeout=5).json()
        return load["num_reqs"] == load["num_waiting_reqs"] == load["num_pages"] == 0

    wait_until(idle, 10)
