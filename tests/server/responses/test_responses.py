"""/v1/responses with OpenAI's own client, against a real server."""

import json

import httpx2
import openai
import pytest
from pydantic import BaseModel

from graftlm.testing.server_process import ServerProcess
from graftlm.testing.thinking_checkpoint import THINK_END_ID

QUESTION = "Which day comes after Thursday?"
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}, "days": {"type": "integer", "minimum": 1, "maximum": 5}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS = [
    {
        "type": "function",
        "name": "get_weather",
        "description": "Tells the weather.",
        "parameters": SCHEMA,
        "strict": True,
    },
    {"type": "function", "name": "add", "parameters": {"type": "object", "properties": {"a": {"enum": [1, 2]}}}},
]
LAST = {"response.completed", "response.incomplete", "response.failed"}


class Weather(BaseModel):
    city: str
    days: int


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as it:
        yield it


def ask(client, input=QUESTION, **fields):
    given = {"model": "demo", "temperature": 0, "max_output_tokens": 60} | fields
    return client.responses.create(input=input, **given)


def events_of(client, **fields):
    return list(ask(client, stream=True, **fields))


def check_order(events):
    """Check the documented order: start, items one after the other with their parts, and the end."""
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] in LAST
    assert not LAST & set(kinds[:-1])
    finished, open_item, opened_part = [], None, None
    for event in events[2:-1]:
        assert event.output_index == len(finished)
        match event.type:
            case "response.output_item.added":
                assert open_item is None
                open_item = event.item
                assert open_item.status == "in_progress"
            case "response.output_item.done":
                assert opened_part is None
                assert (event.item.id, event.item.type) == (open_item.id, open_item.type)
                finished.append(event.item)
                open_item = None
            case "response.content_part.added":
                assert opened_part is None
                opened_part = ""
            case "response.content_part.done":
                assert event.part.text == opened_part
                opened_part = None
            case "response.output_text.delta" | "response.reasoning_text.delta":
                opened_part += event.delta
            case "response.output_text.done" | "response.reasoning_text.done":
                assert event.text == opened_part
            case "response.function_call_arguments.delta" | "response.function_call_arguments.done":
                assert open_item.type == "function_call"
            case other:
                raise AssertionError(other)
        assert getattr(event, "item_id", open_item.id if open_item else "") == (open_item.id if open_item else "")
    assert open_item is None
    assert events[-1].response.output == finished


def refused(server, status=400, method="POST", path="/v1/responses", **fields):
    answer = httpx2.request(method, server.url + path, json={"input": QUESTION} | fields, timeout=60)
    assert answer.status_code == status, answer.text
    return answer.json()["error"]


def num_tokens(server, messages):
    return httpx2.post(server.url + "/v1/tokenize", json={"messages": messages}, timeout=60).json()["count"]


def test_a_text_is_answered(client):
    response = ask(client)
    assert "Friday" in response.output_text
    (item,) = response.output
    assert (item.type, item.role, item.status) == ("message", "assistant", "completed")
    assert (response.status, response.error, response.incomplete_details) == ("completed", None, None)
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens
    assert response.id.startswith("resp")


def test_a_streamed_response_joins_to_the_whole_one(client):
    whole = ask(client)
    events = events_of(client)
    check_order(events)
    final = events[-1].response
    assert final.output_text == whole.output_text
    assert final.usage.output_tokens == whole.usage.output_tokens


def test_the_clients_stream_helper_reads_the_events(client):
    arguments = {"model": "demo", "input": QUESTION, "temperature": 0, "max_output_tokens": 60}
    with client.responses.stream(**arguments) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        final = stream.get_final_response()
    assert text == final.output_text == ask(client).output_text


async def test_the_async_client_works(server):
    async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        response = await client.responses.create(model="demo", input=QUESTION, temperature=0, max_output_tokens=60)
    assert "Friday" in response.output_text


@pytest.mark.parametrize(
    "extra",
    [
        {"min_p": 1.0, "temperature": 1.5},
        {"repetition_penalty": 1.9},
        {"frequency_penalty": 2.0},
        {"presence_penalty": 2.0},
        {"ignore_eos": True},
    ],
)
def test_sampling_fields_of_chats_have_the_same_effect(client, extra):
    question = "Count from one to five."
    fields = {"temperature": 0, "seed": 3} | extra
    response = client.responses.create(model="demo", input=question, max_output_tokens=24, extra_body=fields)
    messages = [{"role": "user", "content": question}]
    chat = client.chat.completions.create(model="demo", messages=messages, max_tokens=24, extra_body=fields)
    assert response.output_text == chat.choices[0].message.content


def test_a_limit_makes_a_response_incomplete(client):
    whole = ask(client, max_output_tokens=2)
    events = events_of(client, max_output_tokens=2)
    check_order(events)
    for response in (whole, events[-1].response):
        assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        assert response.output[0].status == "incomplete"


@pytest.mark.parametrize(
    ("items", "messages"),
    [
        ([{"role": "user", "content": "Hi"}], [{"role": "user", "content": "Hi"}]),
        (
            [
                {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Be brief."}]},
                {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
            ],
            [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "ab"}],
        ),
        (
            [
                {"role": "user", "content": "Hi"},
                {
                    "type": "reasoning",
                    "id": "rs_1",
                    "summary": [],
                    "content": [{"type": "reasoning_text", "text": "x"}],
                },
                {
                    "type": "message",
                    "id": "msg_1",
                    "status": "completed",
                    "role": "assistant",
                    "content": [{"type": "output_text", "text": "Hello.", "annotations": []}],
                },
                {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a": 1}', "id": "fc_1"},
                {"type": "function_call_output", "call_id": "c1", "output": "2"},
                {"role": "user", "content": "So?"},
            ],
            [
                {"role": "user", "content": "Hi"},
                {
                    "role": "assistant",
                    "content": "Hello.",
                    "reasoning_content": "x",
                    "tool_calls": [
                        {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
                    ],
                },
                {"role": "tool", "tool_call_id": "c1", "content": "2"},
                {"role": "user", "content": "So?"},
            ],
        ),
    ],
)
def test_items_are_the_messages_of_a_chat(server, client, items, messages):
    chat = httpx2.post(
        server.url + "/v1/chat/completions", json={"messages": messages, "max_tokens": 1}, timeout=60
    ).json()
    counted = client.responses.input_tokens.count(model="demo", input=items).input_tokens
    assert counted == chat["usage"]["prompt_tokens"]
    assert ask(client, items, max_output_tokens=1).usage.input_tokens == counted


def test_instructions_are_the_system_message(server, client):
    system = {"role": "system", "content": "Be brief."}
    counted = num_tokens(server, [system, {"role": "user", "content": QUESTION}])
    assert ask(client, instructions="Be brief.", max_output_tokens=1).usage.input_tokens == counted


def test_a_call_is_made_and_its_result_read(client):
    response = ask(client, tools=TOOLS, tool_choice={"type": "function", "name": "get_weather"})
    (call,) = response.output
    assert (call.type, call.name, call.status) == ("function_call", "get_weather", "completed")
    assert json.loads(call.arguments).keys() == {"city", "days"}
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    by_items = [{"role": "user", "content": QUESTION}, call, result]
    given = {"tools": TOOLS, "tool_choice": "none", "max_output_tokens": 8}
    again = ask(client, by_items, **given)
    continued = ask(client, [result], previous_response_id=response.id, **given)
    assert continued.output_text == again.output_text
    assert continued.usage.input_tokens == again.usage.input_tokens


def test_streamed_calls_join_to_the_whole_ones(client):
    given = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
    whole = ask(client, **given)
    events = events_of(client, **given)
    check_order(events)
    (expected,), (call,) = whole.output, events[-1].response.output
    assert (call.name, call.arguments) == (expected.name, expected.arguments)
    pieces = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert "".join(pieces) == call.arguments
    (done,) = [event for event in events if event.type == "response.function_call_arguments.done"]
    assert (done.arguments, done.name) == (call.arguments, call.name)


def test_allowed_tools_limit_the_choice(client):
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "add"}]}
    (call,) = ask(client, tools=TOOLS, tool_choice=allowed, parallel_tool_calls=False).output
    assert call.name == "add"


def test_the_text_follows_a_format(client):
    parsed = client.responses.parse(
        model="demo", input=QUESTION, text_format=Weather, temperature=0, max_output_tokens=200
    )
    assert isinstance(parsed.output_parsed, Weather)
    schema = {"type": "json_schema", "name": "weather", "schema": SCHEMA, "strict": True}
    assert json.loads(ask(client, text={"format": schema}).output_text).keys() == {"city", "days"}
    text = ask(client, text={"format": {"type": "json_object"}}, max_output_tokens=200).output_text
    assert text.lstrip().startswith("{")


def test_log_probabilities_come_with_the_text(client):
    response = ask(client, include=["message.output_text.logprobs"], top_logprobs=2)
    tokens = response.output[0].content[0].logprobs
    assert "".join(token.token for token in tokens) == response.output_text  # without the end token
    assert {len(token.top_logprobs) for token in tokens} == {2}
    events = events_of(client, include=["message.output_text.logprobs"], top_logprobs=2)
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert all(delta.logprobs for delta in deltas)


# -- stored responses --------------------------------------------------------------------------------------------------


def test_a_stored_response_is_continued_retrieved_and_deleted(client):
    first = ask(client, instructions="Be brief.")
    assert client.responses.retrieve(first.id).output_text == first.output_text
    second = ask(client, "And then?", previous_response_id=first.id)
    turns = [
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "And then?"},
    ]
    plain = ask(client, turns)
    assert second.output_text == plain.output_text
    assert second.usage.input_tokens == plain.usage.input_tokens  # instructions are not carried over
    items = list(client.responses.input_items.list(second.id, order="asc", limit=2))
    assert [item.role for item in items] == ["user", "assistant", "user"]
    assert [item.id for item in client.responses.input_items.list(second.id)] == [item.id for item in items][::-1]
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)
    assert client.responses.retrieve(second.id).previous_response_id == first.id


def test_a_streamed_response_is_stored(client):
    final = events_of(client)[-1].response
    stored = client.responses.retrieve(final.id)
    assert stored.to_dict() == final.to_dict()


def test_a_response_is_not_stored_where_it_is_not_wanted(client):
    response = ask(client, store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(response.id)


@pytest.mark.full  # test_store.py opens a database again
def test_the_stored_responses_survive_a_restart_with_sqlite(tmp_path):
    store = {"kind": "sqlite", "path": str(tmp_path / "responses.db"), "max_responses": 3}
    config = {"model": "demo", "memory": {"kv_tokens": 8192}, "server": {"response_store": store}}
    ids = []
    for _ in range(2):
        with (
            ServerProcess(config, environment={"OMP_NUM_THREADS": "1"}) as server,
            openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client,
        ):
            for known in ids:
                assert "Friday" in client.responses.retrieve(known).output_text
            ids.append(ask(client, previous_response_id=ids[-1] if ids else None).id)
    assert (tmp_path / "responses.db").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [{"type": "item_reference", "id": "a"}]}, "input.0"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.0.content.0.image_url"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input.0.content.0"),
        ({"input": [{"role": "user", "content": [{"type": ["a"]}]}]}, "input.0.message.content.0.type"),
        ({"tools": [{"type": "web_search"}]}, "tools.0"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "tools.1.name"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "other"}}, "tool_choice.name"),
        ({"text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "nothing"}}}}, "text.format"),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema"),
        ({"previous_response_id": "resp_none"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"truncation": "auto"}, "truncation"),
        ({"max_output_token": 5}, "max_output_token"),
        ({"max_output_tokens": 100_000}, "max_output_tokens"),
    ],
)
def test_a_wrong_request_names_its_field(server, fields, param):
    assert refused(server, **fields)["param"] == param


def test_what_is_not_stored_is_not_found(server):
    for method, path in (
        ("GET", "/v1/responses/none"),
        ("DELETE", "/v1/responses/none"),
        ("POST", "/v1/responses/none/cancel"),
        ("GET", "/v1/responses/none/input_items"),
    ):
        assert "none" in refused(server, 404, method, path)["message"]


def test_a_stored_response_can_be_neither_cancelled_nor_streamed(server, client):
    response_id = ask(client).id
    assert "background" in refused(server, 400, "POST", f"/v1/responses/{response_id}/cancel")["message"]
    assert refused(server, 400, "GET", f"/v1/responses/{response_id}?stream=true")["param"] == "stream"
    assert refused(server, 400, "GET", f"/v1/responses/{response_id}/input_items?after=none")["param"] == "after"


# -- reasoning ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def thinking_client(thinking_server):
    """Talk to the demo model, which knows the tags around reasoning."""
    with openai.OpenAI(base_url=thinking_server.url + "/v1", api_key="none", max_retries=0) as it:
        yield it


def test_reasoning_is_an_item_before_the_message(thinking_client):
    schema = {"type": "json_schema", "name": "a", "schema": {"enum": ["yes", "no"]}}
    num_ended = 0
    for seed in range(8):
        bias = {str(THINK_END_ID): 12}
        own = {"seed": seed, "logit_bias": bias, "chat_template_kwargs": {"opens": True}}
        given = {"temperature": 1.0, "text": {"format": schema}, "extra_body": own}
        whole = ask(thinking_client, **given)
        events = events_of(thinking_client, **given)
        check_order(events)
        assert events[-1].response.output_text == whole.output_text
        if whole.status != "completed" or whole.output[0].type != "reasoning":
            continue
        num_ended += 1
        reasoning, message = whole.output
        assert message.content[0].text in ('"yes"', '"no"')
        assert 0 < whole.usage.output_tokens_details.reasoning_tokens < whole.usage.output_tokens
        turns = [{"role": "user", "content": QUESTION}, *whole.output, {"role": "user", "content": "Sure?"}]
        assert ask(thinking_client, turns, max_output_tokens=2).status in ("incomplete", "completed")
        assert reasoning.content[0].text
    assert num_ended >= 2
