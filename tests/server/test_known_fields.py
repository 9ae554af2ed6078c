"""Fields that clients of other servers send: accepted at their defaults, otherwise supported or refused by name."""

import json

import httpx2
import openai
import pytest

from graftlm.server import known_fields

CHAT = {"messages": [{"role": "user", "content": "What is 2 plus 2?"}], "max_tokens": 2}
#: Path of `known_fields.json` -> a request that the fields are added to.
REQUESTS = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"prompt": "One", "max_tokens": 2},
    "/v1/embeddings": {"input": "One"},
    "/v1/rerank": {"query": "One", "documents": ["Two"], "label_token_ids": [5, 6]},
    "/v1/score": {"query": "One", "items": ["Two"], "label_token_ids": [5, 6]},
    "/v1/tokenize": {"prompt": "One"},
    "/v1/detokenize": {"tokens": [5]},
    "/generate": {"text": "One", "sampling_params": {"max_new_tokens": 2}},
    "/v1/responses": {"input": "One", "max_output_tokens": 2},
    "/v1/chat/completions#messages": CHAT,
    "/v1/chat/completions#stream_options": CHAT | {"stream": True},
    "/generate#sampling_params": {"text": "One"},
}
#: Part of a request -> what it has besides the fields.
SHORT = {"sampling_params": {"max_new_tokens": 2}}
#: Routes for administrators, which other tests call with these fields.
ADMINISTRATION = ("/load_lora_adapter", "/unload_lora_adapter")
TABLE = {path: of for path, of in json.loads(known_fields._FILE.read_text()).items() if path not in ADMINISTRATION}
#: Fields of a request that must not be null.
LIMITS = {"max_tokens": 2, "max_completion_tokens": 2}


def request_with(path, fields):
    """Return the endpoint and the request's body with the given fields added."""
    endpoint, _, part = path.partition("#")
    if part == "messages":
        return endpoint, CHAT | {"messages": [*CHAT["messages"], {"role": "assistant", "content": "4"} | fields]}
    if part:
        return endpoint, REQUESTS[path] | {part: fields | SHORT.get(part, {})}
    kept = {name: LIMITS[name] for name in LIMITS if name in fields}
    sampling = {"sampling_params": REQUESTS[path].get("sampling_params")} if "sampling_params" in fields else {}
    return endpoint, REQUESTS[path] | fields | kept | sampling


def post(server, path, fields):
    endpoint, body = request_with(path, fields)
    return httpx2.post(server.url + endpoint, json=body, timeout=60)


def refused(server, path, fields):
    answer = post(server, path, fields)
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]


@pytest.mark.parametrize(("path", "system"), [(path, system) for path in TABLE for system in TABLE[path]])
def test_every_known_field_is_accepted_at_its_default(request, server, path, system):
    """With --full, each field is also sent alone."""
    alone = request.config.getoption("--full")
    defaults = TABLE[path][system]
    wrong = {}
    with httpx2.Client(base_url=server.url, timeout=60) as client:
        for fields in ({name: value} for name, value in defaults.items() if alone):
            endpoint, body = request_with(path, fields)
            answer = client.post(endpoint, json=body)
            if answer.status_code != 200:
                wrong |= dict.fromkeys(fields, answer.text)
        endpoint, body = request_with(path, defaults)
        together = client.post(endpoint, json=body)
    assert wrong == {}
    assert together.status_code == 200, together.text


@pytest.mark.parametrize("value", [None, "", [], {}, False])
def test_an_empty_field_of_another_endpoint_is_accepted(server, value):
    answer = post(server, "/v1/embeddings", {"bootstrap_host": value})
    assert answer.status_code == 200, answer.text


#: Path -> fields that name something.
NAMING = {
    "/v1/chat/completions": [
        "rid",
        "request_id",
        "lora_path",
        "regex",
        "ebnf",
        "choice",
        "structural_tag",
        "grammar_backend",
        "guided_choice",
        "guided_decoding_backend",
        "guided_regex",
        "guided_grammar",
        "structured_outputs",
        "stop",
        "stop_token_ids",
        "tools",
        "tool_choice",
        "response_format",
        "stream_options",
        "reasoning_effort",
        "logit_bias",
        "logits_processors",
        "cache_salt",
        "extra_key",
        "model",
        "user",
        "chat_template_kwargs",
        "session_id",
    ],
    "/v1/completions": [
        "rid",
        "lora_path",
        "regex",
        "choice",
        "guided_choice",
        "stop",
        "reasoning_end",
        "reasoning_begin",
    ],
    "/v1/embeddings": ["encoding_format", "cache_salt", "model", "user", "rid", "lora_path"],
    "/v1/rerank": ["model", "user", "rid"],
    "/generate": [
        "rid",
        "lora_path",
        "extra_key",
        "cache_salt",
        "session_id",
        "conversation_id",
        "routing_key",
        "custom_labels",
    ],
    "/generate#sampling_params": [
        "regex",
        "ebnf",
        "choice",
        "structural_tag",
        "grammar_backend",
        "stop",
        "stop_token_ids",
    ],
}


@pytest.mark.covering(strength=1)
@pytest.mark.parametrize("path", NAMING)
@pytest.mark.parametrize("value", [None, "", [], {}, False])
def test_a_field_that_names_something_requests_nothing_where_it_is_empty(server, path, value):
    with httpx2.Client(base_url=server.url, timeout=60) as client:
        for names in ([name] for name in NAMING[path]):
            endpoint, body = request_with(path, dict.fromkeys(names, value))
            answer = client.post(endpoint, json=body)
            assert answer.status_code == 200, (names, answer.text)
        endpoint, body = request_with(path, dict.fromkeys(NAMING[path], value))
        assert client.post(endpoint, json=body).status_code == 200


@pytest.mark.parametrize("name", ["json_schema", "guided_json"])
def test_an_empty_schema_admits_any_json_and_an_empty_text_is_no_schema(server, name):
    def answer(value):
        body = CHAT | {"max_tokens": 40, "temperature": 0, name: value}
        answer = httpx2.post(server.url + "/v1/chat/completions", json=body, timeout=60)
        return answer.json()["choices"][0]["message"]["content"]

    assert answer("") == "2 + 2 = 4."
    json.loads(answer({}))


@pytest.mark.parametrize(
    ("path", "fields", "param", "says"),
    [
        ("/v1/chat/completions", {"return_hidden_states": True}, "return_hidden_states", "a field of SGLang 0.5"),
        ("/v1/completions", {"allowed_token_ids": [5]}, "allowed_token_ids", "a field of vLLM 0.32"),
        ("/v1/completions", {"routed_experts_start_len": 1}, "routed_experts_start_len", "not supported"),
        ("/v1/completions", {"routed_experts_start_len": True}, "routed_experts_start_len", "not supported"),
        ("/v1/completions", {"suffix": "x"}, "suffix", "not supported"),
        ("/generate", {"return_hidden_states": True}, "return_hidden_states", "SGLang 0.5"),
        ("/generate#sampling_params", {"beam_width": 4}, "sampling_params.beam_width", "SGLang 0.5"),
        (
            "/v1/chat/completions#messages",
            {"provider_specific_fields": {"reasoning": "x"}},
            "messages.1.provider_specific_fields",
            "LiteLLM 1.106",
        ),
        ("/v1/rerank", {"truncate_prompt_tokens": 5}, "truncate_prompt_tokens", "vLLM 0.32"),
    ],
)
def test_a_known_field_that_requests_an_unsupported_feature_is_refused_by_name(server, path, fields, param, says):
    error = refused(server, path, fields)
    assert error["param"] == param
    assert error["code"] == "unsupported"
    assert says in error["message"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/generate"])
def test_an_unknown_field_is_refused_with_the_nearest_name(server, path):
    error = refused(server, path, {"bootstrap_hosts": None})
    assert error["param"] == "bootstrap_hosts"
    nearby = refused(server, path, {"prioritie": 1})
    assert "'priority'" in nearby["message"]


@pytest.mark.parametrize(
    ("fields", "own"),
    [
        ({"guided_choice": ["red", "blue"]}, {"choice": ["red", "blue"]}),
        ({"guided_regex": "[0-9]{4}"}, {"regex": "[0-9]{4}"}),
        ({"guided_json": {"enum": [1, 2]}}, {"json_schema": {"enum": [1, 2]}}),
        ({"guided_grammar": 'root ::= "yes" | "no"'}, {"ebnf": 'root ::= "yes" | "no"'}),
        ({"structured_outputs": {"choice": ["red", "blue"]}}, {"choice": ["red", "blue"]}),
        ({"structured_outputs": {"regex": "[0-9]{4}", "json": None}}, {"regex": "[0-9]{4}"}),
        ({"structured_outputs": {"json": {"enum": [1, 2]}}}, {"json_schema": {"enum": [1, 2]}}),
        ({"structured_outputs": {"json_object": True}}, {"json_schema": {"type": "object"}}),
        ({"structured_outputs": {"grammar": 'root ::= "yes" | "no"'}}, {"ebnf": 'root ::= "yes" | "no"'}),
        (
            {"guided_regex": "[0-9]{4}", "guided_decoding_backend": "guidance"},
            {"regex": "[0-9]{4}", "grammar_backend": "llguidance"},
        ),
        ({"guided_regex": "[0-9]{4}", "guided_decoding_backend": "auto"}, {"regex": "[0-9]{4}"}),
        ({"stop": "a", "no_stop_trim": True}, {"stop": "a", "include_stop_str_in_output": True}),
    ],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_another_servers_name_of_a_field_has_the_same_effect(server, path, fields, own):
    both = [
        post(server, path, given | {"max_tokens": 12, "temperature": 0, "separate_reasoning": None}).json()["choices"]
        for given in (fields, own)
    ]
    assert both[0] == both[1]


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        (
            {"structured_outputs": {"regex": "a", "whitespace_pattern": " "}},
            "structured_outputs.whitespace_pattern",
            "vLLM",
        ),
        ({"structured_outputs": {"regexp": "a"}}, "structured_outputs.regexp", "known fields: json, regex"),
        ({"guided_regex": "a", "regex": "b"}, "guided_regex", "the same as regex"),
        ({"rid": "a", "request_id": "b"}, "rid", "the same as request_id"),
        ({"guided_decoding_backend": "lm-format-enforcer"}, "guided_decoding_backend", "known: auto, guidance"),
        (
            {"guided_decoding_backend": "guidance", "grammar_backend": "xgrammar"},
            "guided_decoding_backend",
            "the same as grammar_backend",
        ),
        ({"guided_regex": "("}, "regex", ""),
        ({"structured_outputs": 5}, "structured_outputs", "vLLM"),
    ],
)
def test_an_invalid_value_of_a_renamed_field_is_refused_by_that_name(server, fields, param, says):
    error = refused(server, "/v1/chat/completions", fields)
    assert error["param"] == param
    assert says in error["message"]


def test_generate_accepts_the_model_that_a_router_adds(server):
    body = {"text": "One", "sampling_params": {"max_new_tokens": 4, "temperature": 0}}
    answers = [
        httpx2.post(server.url + "/generate", json=body | fields, timeout=60)
        for fields in ({}, {"model": "demo"}, {"model": "unknown"})
    ]
    assert len({answer.json()["text"] for answer in answers}) == 1


def test_rid_is_the_id_of_the_answer(server):
    answer = post(server, "/v1/completions", {"rid": "mine-1"})
    assert answer.json()["id"] == "mine-1"


def test_a_completion_accepts_a_response_format(server):
    fields = {
        "max_tokens": 20,
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"enum": [7]}}},
    }
    answer = post(server, "/v1/completions", fields)
    assert answer.json()["choices"][0]["text"].strip() == "7"


def test_an_extra_key_separates_cached_prefixes_like_a_salt(server):
    def cached(**keys):
        body = {
            "prompt": "A prefix that both requests begin with, long enough for a page of the cache.",
            "max_tokens": 1,
        }
        return httpx2.post(server.url + "/v1/completions", json=body | keys, timeout=60).json()["usage"][
            "prompt_tokens_details"
        ]["cached_tokens"]

    assert cached(extra_key="one") == 0
    assert cached(extra_key="one") > 0
    assert cached(extra_key="two") == 0
    assert cached(extra_key="one", cache_salt="s") == 0
    assert cached(cache_salt="one") > 0  # each of them alone has the same effect


def test_continuous_usage_is_part_of_every_event(server):
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        for include in (True, False):
            options = {"include_usage": include, "continuous_usage_stats": True}
            arguments = {"model": "demo", "max_tokens": 6, "temperature": 0, "stream": True, "stream_options": options}
            chat = list(client.chat.completions.create(messages=CHAT["messages"], **arguments))
            text = list(client.completions.create(prompt="One two", extra_body={"ignore_eos": True}, **arguments))
            for events in (chat, text):
                counts = [event.usage.completion_tokens for event in events]
                assert counts == sorted(counts)
                assert 0 < counts[-1] <= 6
                assert {event.usage.prompt_tokens for event in events} == {events[0].usage.prompt_tokens}


def test_default_and_an_empty_name_mean_the_served_model(server):
    for name in ("default", "", None, "demo"):
        answer = httpx2.post(server.url + "/v1/chat/completions", json=CHAT | {"model": name}, timeout=60)
        assert answer.json()["model"] == "demo", answer.text
    assert (
        httpx2.post(server.url + "/v1/chat/completions", json=CHAT | {"model": "other"}, timeout=60).status_code == 404
    )
