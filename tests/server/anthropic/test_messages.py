"""Anthropic's API with Anthropic's own client, against a real server."""

import json

import anthropic
import httpx2
import pytest

from graftlm.testing.thinking_checkpoint import THINK_END_ID

CHAT = [{"role": "user", "content": "Which day comes after Thursday?"}]
GREEDY = {"temperature": 0}
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}, "days": {"type": "integer", "minimum": 1, "maximum": 5}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS = [
    {"name": "get_weather", "description": "Tells the weather.", "input_schema": CITY, "strict": True},
    {"name": "add", "input_schema": {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}},
]

#: Forbids the tokens that end an answer.
NO_END = {"1": -100, "6": -100}


@pytest.fixture
def client(server):
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as it:
        yield it


def arguments(messages=CHAT, **fields):
    own = GREEDY | fields.pop("extra_body", {})
    return {"model": "demo", "max_tokens": 60, "messages": messages, "extra_body": own} | fields


def ask(client, messages=CHAT, **fields):
    return client.messages.create(**arguments(messages, **fields))


def streamed(client, messages=CHAT, **fields):
    """Return the client's own reading of a stream, and the raw events."""
    with client.messages.stream(**arguments(messages, **fields)) as stream:
        events = [event for event in stream if event.type in RAW_EVENTS]
        return stream.get_final_message(), events


def plain(message):
    """Return a message's blocks without what the client's stream helper adds."""
    return [block.model_dump(exclude={"parsed_output"}) for block in message.content]


RAW_EVENTS = {
    "message_start",
    "content_block_start",
    "content_block_delta",
    "content_block_stop",
    "message_delta",
    "message_stop",
}


def check_order(events):
    """Check the documented order: the start, blocks one after the other, the delta and the stop of the message."""
    kinds = [event.type for event in events]
    assert kinds[0] == "message_start"
    assert kinds[-2:] == ["message_delta", "message_stop"]
    index, is_open = -1, False
    for event in events[1:-2]:
        if event.type == "content_block_start":
            assert not is_open
            index, is_open = index + 1, True
        else:
            assert is_open
            is_open = event.type == "content_block_delta"
        assert event.index == index
    assert not is_open


def refused(server, status=400, path="/v1/messages", **fields):
    body = {"model": "demo", "max_tokens": 5, "messages": CHAT} | fields
    answer = httpx2.post(server.url + path, json=body, timeout=60)
    assert answer.status_code == status, answer.text
    body = answer.json()
    assert body["type"] == "error"
    assert body["request_id"] == answer.headers["request-id"]
    return body["error"]


def test_a_message_is_answered(client):
    message = ask(client)
    (block,) = message.content
    assert (block.type, message.role, message.model) == ("text", "assistant", "demo")
    assert "Friday" in block.text
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    assert message.id.startswith("msg")
    assert message._request_id


def test_a_streamed_message_joins_to_the_whole_one(client):
    whole = ask(client)
    message, events = streamed(client)
    check_order(events)
    assert plain(message) == plain(whole)
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    assert message.usage.output_tokens == whole.usage.output_tokens
    # A long answer, because a busy server joins the tokens of some milliseconds.
    _, events = streamed(client, max_tokens=800, extra_body={"logit_bias": NO_END})
    assert sum(event.type == "content_block_delta" for event in events) > 2


def test_a_ping_follows_the_start(server):
    body = {"model": "demo", "max_tokens": 5, "messages": CHAT, "stream": True}
    text = httpx2.post(server.url + "/v1/messages", json=body, timeout=60).text
    events = text.strip().split("\n\n")
    assert events[1] == 'event: ping\ndata: {"type":"ping"}'
    assert events[-1] == 'event: message_stop\ndata: {"type":"message_stop"}'
    for event in events:
        name, data = event.split("\n")
        assert json.loads(data.removeprefix("data: "))["type"] == name.removeprefix("event: ")


async def test_the_async_client_works(server):
    async with (
        anthropic.AsyncAnthropic(base_url=server.url, api_key="none", max_retries=0) as client,
        client.messages.stream(**arguments()) as stream,
    ):
        text = "".join([piece async for piece in stream.text_stream])
    assert "Friday" in text


@pytest.mark.parametrize(
    ("fields", "reason", "sequence"),
    [
        ({"max_tokens": 2}, "max_tokens", None),
        ({"stop_sequences": [" comes", "xyz"]}, "stop_sequence", " comes"),
        ({"stop_sequences": []}, "end_turn", None),
    ],
)
def test_the_stop_reason_says_why_an_answer_ended(client, fields, reason, sequence):
    whole = ask(client, **fields)
    message, _ = streamed(client, **fields)
    for answer in (whole, message):
        assert (answer.stop_reason, answer.stop_sequence) == (reason, sequence)
        assert answer.content[0].text.startswith("Fri")
        assert "comes" not in answer.content[0].text or sequence is None


def test_a_full_context_ends_an_answer(server, client):
    context_len = httpx2.get(server.url + "/v1/models").json()["data"][0]["max_model_len"]
    many = "2 " * ((context_len - 40) // 2)
    used = client.messages.count_tokens(model="demo", messages=[{"role": "user", "content": many}]).input_tokens
    assert context_len / 2 < used < context_len
    message = ask(
        client, [{"role": "user", "content": many}], max_tokens=100_000, timeout=60, extra_body={"logit_bias": NO_END}
    )
    assert message.stop_reason == "model_context_window_exceeded"


def test_the_token_counts_separate_cached_tokens(client):
    text = "A question that no other test has asked, long enough for a page of the cache: what is two plus two?"
    first = ask(client, [{"role": "user", "content": text}], max_tokens=1).usage
    again = ask(client, [{"role": "user", "content": text}], max_tokens=1).usage
    assert again.input_tokens + again.cache_read_input_tokens == first.input_tokens + first.cache_read_input_tokens
    assert again.cache_read_input_tokens > first.cache_read_input_tokens
    count = client.messages.count_tokens(model="demo", messages=[{"role": "user", "content": text}])
    assert count.input_tokens == again.input_tokens + again.cache_read_input_tokens


@pytest.mark.parametrize(
    "system", ["Answer in one word.", [{"type": "text", "text": "Answer in one word.", "cache_control": None}]]
)
def test_the_system_prompt_is_the_chats_first_message(server, client, system):
    chat = [{"role": "system", "content": "Answer in one word."}, *CHAT]
    counted = httpx2.post(server.url + "/v1/tokenize", json={"messages": chat}, timeout=60).json()["count"]
    assert client.messages.count_tokens(model="demo", messages=CHAT, system=system).input_tokens == counted
    usage = ask(client, system=system, max_tokens=1).usage
    assert usage.input_tokens + usage.cache_read_input_tokens == counted


def test_blocks_and_turns_in_a_row_are_one_chat(server, client):
    turns = [
        {"role": "user", "content": [{"type": "text", "text": "What is"}, {"type": "text", "text": "2 plus 2?"}]},
        {"role": "user", "content": "Tell me."},
        {"role": "assistant", "content": [{"type": "text", "text": "2 + 2 = "}, {"type": "text", "text": "4."}]},
        {"role": "user", "content": "Thanks."},
    ]
    chat = [
        {"role": "user", "content": "What is\n2 plus 2?\nTell me."},
        {"role": "assistant", "content": "2 + 2 = 4."},
        {"role": "user", "content": "Thanks."},
    ]
    counted = httpx2.post(server.url + "/v1/tokenize", json={"messages": chat}, timeout=60).json()["count"]
    assert client.messages.count_tokens(model="demo", messages=turns).input_tokens == counted


def test_the_assistants_last_turn_is_continued(client):
    (whole,) = ask(client).content
    begun = [*CHAT, {"role": "assistant", "content": "Friday comes"}]
    (block,) = ask(client, begun).content
    assert f"Friday comes{block.text}" == whole.text


def test_a_tool_is_called_and_its_result_read(client):
    choice = {"type": "tool", "name": "get_weather"}
    message = ask(client, tools=TOOLS, tool_choice=choice)
    (block,) = message.content
    assert (block.type, block.name, message.stop_reason) == ("tool_use", "get_weather", "tool_use")
    assert block.input.keys() == {"city", "days"}
    result = {"type": "tool_result", "tool_use_id": block.id, "content": [{"type": "text", "text": "sunny"}]}
    turns = [*CHAT, {"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
    answer = ask(client, turns, tools=TOOLS, tool_choice={"type": "none"}, max_tokens=5)
    assert answer.content[0].type == "text"
    plain = client.messages.count_tokens(model="demo", messages=turns, tools=TOOLS).input_tokens
    assert plain > client.messages.count_tokens(model="demo", messages=turns[:1]).input_tokens


def test_a_streamed_call_joins_to_the_whole_one(client):
    given = {"tools": TOOLS, "tool_choice": {"type": "any", "disable_parallel_tool_use": True}}
    whole = ask(client, **given)
    message, events = streamed(client, **given)
    check_order(events)
    (expected,), (block,) = whole.content, message.content
    assert (block.name, block.input) == (expected.name, expected.input)
    assert message.stop_reason == whole.stop_reason == "tool_use"
    assert any(event.type == "content_block_delta" for event in events)
    note = {"type": "string", "minLength": 900, "maxLength": 1000}
    schema = {"type": "object", "properties": {"note": note}, "required": ["note"]}
    tool = {"name": "write", "input_schema": schema, "strict": True}
    chosen = {"type": "tool", "name": "write"}
    message, events = streamed(client, tools=[tool], tool_choice=chosen, max_tokens=1500)
    assert sum(event.type == "content_block_delta" for event in events) > 1
    assert len(message.content[0].input["note"]) >= 900


def test_the_model_may_answer_without_a_call(client):
    message = ask(client, [{"role": "user", "content": "What is 2 plus 2?"}], tools=TOOLS)
    assert [block.type for block in message.content] == ["text"]
    assert message.stop_reason == "end_turn"


def test_an_answer_follows_a_schema(client):
    config = {"format": {"type": "json_schema", "schema": CITY}}
    (block,) = ask(client, output_config=config).content
    assert json.loads(block.text).keys() == {"city", "days"}


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "content.0.source"),
        ({"messages": [{"role": "user", "content": [{"type": "document", "source": {}}]}]}, "'document'"),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "a", "name": "b", "input": {}}]}]},
            "user",
        ),
        ({"system": [{"type": "image"}]}, "system.0"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "tools.1.name"),
        ({"tools": [{"name": "a", "input_schema": {"type": "array"}}]}, "tools.0.input_schema"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "other"}}, "other"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"type": "nothing"}}}}, "nothing"),
        ({"max_token": 5}, "max_tokens"),
        ({"container": "a"}, "container"),
        ({"messages": [{"role": "user", "content": "long " * 5000}]}, "context"),
    ],
)
def test_a_wrong_request_is_refused_in_anthropics_shape(server, fields, says):
    error = refused(server, **fields)
    assert error["type"] == "invalid_request_error"
    assert says in error["message"]
    assert "function.parameters" not in error["message"]


def test_errors_of_every_layer_have_anthropics_shape(server):
    assert refused(server, 404, model="other")["type"] == "not_found_error"
    assert refused(server, 404, path="/v1/messages/batches")["type"] == "not_found_error"
    answer = httpx2.post(server.url + "/v1/messages", content=b"{", headers={"Content-Type": "application/json"})
    assert answer.json()["error"]["type"] == "invalid_request_error"
    foreign = httpx2.post(server.url + "/v1/messages", json={}, headers={"Origin": "http://elsewhere.example"})
    assert (foreign.status_code, foreign.json()["error"]["type"]) == (403, "permission_error")
    openai_error = httpx2.post(server.url + "/v1/chat/completions", json={}).json()
    assert openai_error["error"]["type"] == "invalid_request_error"
    assert "type" not in openai_error


def test_the_clients_exception_has_the_message(client):
    with pytest.raises(anthropic.NotFoundError, match="'other' does not exist") as caught:
        ask(client, model="other")
    assert caught.value.request_id


# -- reasoning ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def thinking_client(thinking_server):
    with anthropic.Anthropic(base_url=thinking_server.url, api_key="none", max_retries=0) as it:
        yield it


ON = {"type": "enabled", "budget_tokens": 1024}


def test_reasoning_is_a_thinking_block(thinking_client):
    answer_format = {"format": {"type": "json_schema", "schema": {"enum": ["yes", "no"]}}}
    num_ended = 0
    for seed in range(8):
        own = {"temperature": 1.0, "seed": seed, "logit_bias": {str(THINK_END_ID): 12}}
        given = {"thinking": ON, "max_tokens": 60, "extra_body": own, "output_config": answer_format}
        whole = ask(thinking_client, **given)
        message, events = streamed(thinking_client, **given)
        check_order(events)
        assert plain(message) == plain(whole)
        thinking = next((block for block in whole.content if block.type == "thinking"), None)
        if thinking is None or whole.stop_reason != "end_turn":
            continue
        num_ended += 1
        assert [block.type for block in whole.content] == ["thinking", "text"]
        assert thinking.thinking
        assert thinking.signature
        assert whole.content[1].text in ('"yes"', '"no"')
        assert 0 < whole.usage.output_tokens_details.thinking_tokens < whole.usage.output_tokens
        kinds = [event.delta.type for event in events if event.type == "content_block_delta"]
        assert kinds[kinds.index("text_delta") - 1] == "signature_delta"
    assert num_ended >= 2


@pytest.mark.parametrize(
    ("thinking", "kinds"),
    [
        (ON | {"display": "omitted"}, ["thinking"]),
        ({"type": "disabled"}, ["text"]),
        ({"type": "adaptive"}, ["text"]),
    ],
)
def test_thinking_is_shown_as_wanted(thinking_client, thinking, kinds):
    whole = ask(thinking_client, thinking=thinking, max_tokens=20)
    message, events = streamed(thinking_client, thinking=thinking, max_tokens=20)
    check_order(events)
    assert plain(message) == plain(whole)
    assert [block.type for block in whole.content] == kinds
    if kinds == ["thinking"]:
        assert whole.content[0].thinking == ""


def test_a_thinking_block_is_sent_back(thinking_client):
    blocks = [
        {"type": "thinking", "thinking": "Easy.", "signature": "s"},
        {"type": "redacted_thinking", "data": "x"},
        {"type": "text", "text": "Friday."},
    ]
    turns = [*CHAT, {"role": "assistant", "content": blocks}, {"role": "user", "content": "And then?"}]
    assert ask(thinking_client, turns, max_tokens=5).content


def test_the_key_is_sent_in_either_header(keyed_server):
    body = {"model": "demo", "max_tokens": 2, "messages": CHAT}

    def status(path="/v1/messages", **headers):
        return httpx2.post(keyed_server.url + path, json=body, headers=headers, timeout=60).status_code

    assert status() == status(**{"x-api-key": "wrong"}) == 401
    assert status(**{"x-api-key": "s3cret-of-users"}) == status(Authorization="Bearer s3cret-of-users") == 200
    assert status("/v1/messages/count_tokens", **{"x-api-key": "wrong"}) == 401
    assert status("/v1/chat/completions", **{"x-api-key": "s3cret-of-users"}) == 401
    with (
        anthropic.Anthropic(base_url=keyed_server.url, api_key="wrong", max_retries=0) as client,
        pytest.raises(anthropic.AuthenticationError),
    ):
        ask(client)
