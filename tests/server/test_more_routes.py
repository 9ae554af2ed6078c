"""Further routes and fields of SGLang and vLLM: embeddings, classes, parsers, names of weights, cut prompts."""

import shutil

import httpx2
import numpy as np
import pytest

from graftlm.demo import demo_checkpoint
from graftlm.server.openai import classification
from graftlm.testing.server_process import ServerProcess
from graftlm.testing.tiny_models import write_tiny_checkpoint

CALLS = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
TOOLS = [
    {"type": "function", "function": {"name": "other"}},
    {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}},
]


def post(server, path, status=200, **body):
    answer = httpx2.post(server.url + path, json=body, timeout=60)
    assert answer.status_code == status, answer.text
    return answer.json() if status == 200 else answer.json()["error"]


def test_encode_gives_the_vectors_of_embeddings(server):
    expected = [entry["embedding"] for entry in post(server, "/v1/embeddings", input=["a fox", "a dog"])["data"]]
    many = post(server, "/encode", text=["a fox", "a dog"], rid=["a", "b"])
    assert [entry["meta_info"]["id"] for entry in many] == ["a", "b"]
    np.testing.assert_allclose([entry["embedding"] for entry in many], expected, rtol=1e-4, atol=1e-6)
    one = post(server, "/encode", text="a fox", dimensions=8)
    assert len(one["embedding"]) == 8
    ids = post(server, "/v1/tokenize", prompt="a fox")["tokens"]
    assert post(server, "/encode", input_ids=ids)["embedding"] == pytest.approx(expected[0], rel=1e-4, abs=1e-6)


def test_the_tokens_of_a_chat_with_tools_are_those_of_its_prompt(server):
    chat = {"messages": [{"role": "user", "content": "What is the weather in Oslo?"}]}
    tools = [{"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}]
    plain, with_tools = post(server, "/v1/tokenize", **chat), post(server, "/v1/tokenize", **chat, tools=tools)
    usage = post(server, "/v1/chat/completions", **chat, tools=tools, max_tokens=1)["usage"]
    assert with_tools["count"] == usage["prompt_tokens"] > plain["count"]
    assert post(server, "/tokenize", **chat, tools=tools, tool_choice="none") == plain
    begun = [*chat["messages"], {"role": "assistant", "content": "It"}]
    open_chat = post(server, "/v1/tokenize", messages=begun, continue_final_message=True)
    assert open_chat["tokens"][: plain["count"]] == plain["tokens"]
    assert open_chat["count"] > plain["count"]


@pytest.mark.parametrize("body", [{}, {"text": "a", "input_ids": [5]}, {"text": []}, {"text": ["a", "b"], "rid": "x"}])
def test_encode_refuses_what_is_no_text(server, body):
    assert post(server, "/encode", 400, **body)["message"]


def test_one_class_has_a_probability(head_server):
    check_probabilities(head_server, 1)


@pytest.mark.full  # the next test has the probabilities, and the previous one the route
def test_several_classes_have_probabilities(tmp_path):
    path = write_tiny_checkpoint(tmp_path, "qwen3", 5, num_labels=3, tokenizer=True)
    config = {"model": str(path), "memory": {"kv_tokens": 1024}, "server": {"served_model_name": "tiny"}}
    with ServerProcess(config, environment={"OMP_NUM_THREADS": "1"}) as server:
        check_probabilities(server, 3)


def test_the_probabilities_of_several_classes_are_their_softmax():
    expected = np.exp([1, 2, 4]) / np.exp([1, 2, 4]).sum()
    for shift in (0, 1000, -1000):  # the exponential function of large scores would overflow
        found = classification._probabilities(np.array([1, 2, 4], dtype=np.float32) + shift)
        np.testing.assert_allclose(found, expected, rtol=1e-3)


def check_probabilities(server, num_labels):
    raw = [entry["embedding"] for entry in post(server, "/classify", text=["a fox", "a dog"])]
    answer = post(server, "/v1/classify", input=["a fox", "a dog"], model="tiny")
    scores = post(server, "/v1/classify", input="a fox", use_activation=False)["data"][0]
    powers = np.exp(raw)
    expected = powers / (1 + powers) if num_labels == 1 else powers / powers.sum(axis=1, keepdims=True)
    np.testing.assert_allclose([entry["probs"] for entry in answer["data"]], expected, rtol=1e-3)
    assert {entry["num_classes"] for entry in answer["data"]} == {num_labels}
    assert scores["probs"] == pytest.approx(raw[0], rel=1e-3)
    assert answer["data"][0]["label"].startswith("LABEL_")
    assert answer["usage"]["completion_tokens"] == 0


def test_a_model_without_a_score_head_does_not_classify(server):
    assert "score head" in post(server, "/v1/classify", 400, input="a")["message"]


@pytest.mark.parametrize("name", [None, "hermes", "qwen25", ""])
def test_calls_are_read_from_a_text(server, name):
    answer = post(server, "/parse_function_call", text=f"Yes. {CALLS}", tools=TOOLS, tool_call_parser=name)
    (call,) = answer["calls"]
    assert (call["tool_index"], call["name"], call["parameters"].replace(" ", "")) == (1, "add", '{"a":1}')
    assert answer["normal_text"].strip() == "Yes."
    assert post(server, "/parse_function_call", text="No.", tools=TOOLS) == {"normal_text": "No.", "calls": []}


@pytest.mark.parametrize(
    ("text", "reasoning", "rest"),
    [
        ("<think>\nEasy.\n</think>\n\nFriday.", "Easy.", "Friday."),
        ("Easy.\n</think>\n\nFriday.", "Easy.", "Friday."),
        ("Friday.", "", "Friday."),
    ],
)
@pytest.mark.parametrize("name", [None, "qwen3"])
def test_reasoning_is_separated_from_a_text(thinking_server, text, reasoning, rest, name):
    answer = post(thinking_server, "/separate_reasoning", text=text, reasoning_parser=name)
    assert {key: value.strip() for key, value in answer.items()} == {"reasoning_text": reasoning, "text": rest}


def test_another_format_is_refused_by_name(server, thinking_server):
    error = post(server, "/parse_function_call", 400, text="a", tools=TOOLS, tool_call_parser="mistral")
    assert (error["param"], "'hermes'" in error["message"]) == ("tool_call_parser", True)
    error = post(thinking_server, "/separate_reasoning", 400, text="a", reasoning_parser="step3")
    assert (error["param"], "'think'" in error["message"]) == ("reasoning_parser", True)
    assert post(server, "/separate_reasoning", 400, text="a")["param"] == "reasoning_parser"


def test_the_weights_have_the_name_and_the_path_of_the_last_update(thinking_server):
    def info():
        return httpx2.get(thinking_server.url + "/get_model_info").json()

    def load(path):
        post(thinking_server, "/update_weights_from_disk", model_path=str(path))

    own, other = thinking_server.model, thinking_server.checkpoints / "other"
    shutil.copytree(demo_checkpoint(), other, dirs_exist_ok=True)
    assert info()["model_path"] == str(own)
    answer = post(thinking_server, "/update_weight_version", new_version="step-1", abort_all_requests=False)
    assert (answer["success"], answer["new_version"], info()["weight_version"]) == (True, "step-1", "step-1")
    assert post(thinking_server, "/generate", text="One")["meta_info"]["weight_version"] == "step-1"
    load(other)
    try:
        assert (info()["model_path"], info()["weight_version"]) == (str(other), "step-1")
    finally:
        load(own)


def test_a_get_profiles_too_but_not_for_a_page(thinking_server):
    foreign = {"Origin": "http://elsewhere.example"}
    for path in ("/start_profile", "/stop_profile"):
        assert httpx2.get(thinking_server.url + path, headers=foreign).status_code == 403
    assert httpx2.get(thinking_server.url + "/start_profile", timeout=60).status_code == 200
    post(thinking_server, "/generate", text="One", sampling_params={"max_new_tokens": 2})
    assert httpx2.get(thinking_server.url + "/stop_profile", timeout=60).json()["files"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "2 " * 1500, "max_tokens": 1}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "2 " * 1500}], "max_tokens": 1}),
        ("/v1/embeddings", {"input": "2 " * 1500}),
    ],
)
def test_a_prompt_is_cut_to_its_last_tokens(server, path, body):
    context_len = httpx2.get(server.url + "/v1/models").json()["data"][0]["max_model_len"]
    assert "maximum context length" in post(server, path, 400, **body)["message"]
    assert post(server, path, truncate_prompt_tokens=7, **body)["usage"]["prompt_tokens"] == 7
    most = context_len - (path != "/v1/embeddings")
    assert post(server, path, truncate_prompt_tokens=-1, **body)["usage"]["prompt_tokens"] == most
    assert post(server, path, 400, truncate_prompt_tokens=0, **body)["param"] == "truncate_prompt_tokens"


def test_the_tokens_that_are_kept_are_the_last(server):
    long = post(
        server, "/v1/completions", prompt="Seven. One, two,", max_tokens=6, temperature=0, truncate_prompt_tokens=4
    )
    ids = post(server, "/v1/tokenize", prompt="Seven. One, two,")["tokens"][-4:]
    short = post(server, "/v1/completions", prompt=ids, max_tokens=6, temperature=0)
    assert long["choices"][0]["text"] == short["choices"][0]["text"]


def test_every_delta_has_reasoning_content(server):
    body = {"messages": [{"role": "user", "content": "What is 2 plus 2?"}], "stream": True, "max_tokens": 8}
    text = httpx2.post(server.url + "/v1/chat/completions", json=body, timeout=60).text
    events = [line for line in text.splitlines() if line.startswith("data: {")]
    assert len(events) > 1
    assert all('"reasoning_content":null' in event for event in events)
