"""POST /generate of a real server, compared with the engine in this process."""

import itertools
import json
import re
import threading

import httpx2
import numpy as np
import pytest

from graftlm import Engine, SamplingParams
from graftlm.outputs import GatheredOutput
from graftlm.processes.generation import PreparedRequest
from graftlm.server.native.answers import AnswerWriter
from graftlm.server.native.prompts import NativePrompt
from graftlm.server.native.responses import AnswerBody
from graftlm.testing.server_process import wait_until
from graftlm.types import Completion, FinishReason, Timings, TokenLogprob, Usage

PROMPT = "The capital of France is"
GREEDY = {"temperature": 0, "max_new_tokens": 8}
LONG = {"temperature": 0, "max_new_tokens": 1500, "ignore_eos": True}


@pytest.fixture(scope="module")
def engine():
    with Engine(model="demo", memory={"kv_tokens": 8192}) as engine:
        yield engine


@pytest.fixture(scope="module")
def client(server):
    with httpx2.Client(base_url=server.url, timeout=60) as client:
        yield client


@pytest.fixture
def generate(client):
    def post(**body):
        response = client.post("/generate", json={"sampling_params": GREEDY} | body)
        assert response.status_code == 200, response.text
        answer = response.json()
        for each in answer if isinstance(answer, list) else [answer]:
            AnswerBody.model_validate(each)  # the type in the OpenAPI document
        return answer

    return post


@pytest.fixture
def refused(client):
    """Send a body that must be refused; return the message."""

    def post(**body):
        # ASCII with escapes: half a surrogate pair cannot be sent in any other way.
        response = client.post("/generate", content=json.dumps(body), headers={"Content-Type": "application/json"})
        assert response.status_code == 400, response.text
        return response.json()["error"]["message"]

    return post


def events(client, **body):
    """Return the events of a stream, without the last event [DONE]."""
    with client.stream("POST", "/generate", json={"sampling_params": GREEDY, "stream": True} | body) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    found = [json.loads(line) for line in lines[:-1]]
    for event in found:
        AnswerBody.model_validate(event)
    return found


class TestAnswer:
    def test_text_and_tokens_are_those_of_the_engine(self, generate, engine):
        (expected,) = engine.generate(PROMPT, SamplingParams(temperature=0, max_tokens=8))
        answer = generate(text=PROMPT)
        assert answer["text"] == expected.text
        assert answer["output_ids"] == list(expected.token_ids)
        meta = answer["meta_info"]
        assert meta["prompt_tokens"] == len(expected.prompt_token_ids)
        assert meta["completion_tokens"] == len(expected.token_ids)
        assert meta["e2e_latency"] > 0
        assert meta["weight_version"] == "default"

    def test_token_ids_are_accepted_as_prompts(self, generate, engine):
        ids = engine.tokenizer.encode(PROMPT).tolist()
        assert generate(input_ids=ids)["output_ids"] == generate(text=PROMPT)["output_ids"]

    def test_a_shared_prefix_is_reused_and_reported(self, client, generate):
        prompt = "A sentence that only this test sends, " * 3
        client.post("/flush_cache")
        assert generate(text=prompt)["meta_info"]["cached_tokens"] == 0
        assert generate(text=prompt)["meta_info"]["cached_tokens"] > 0

    @pytest.mark.parametrize("field", ["cache_salt", "extra_key"])
    def test_prompts_with_different_salts_share_nothing(self, generate, field):
        prompt = f"Another sentence, sent with a {field}. " * 3
        for salt in ("a", "b"):
            assert generate(text=prompt, **{field: field + salt})["meta_info"]["cached_tokens"] == 0
        assert generate(text=prompt, **{field: field + "a"})["meta_info"]["cached_tokens"] > 0

    def test_salt_and_extra_key_together_separate_prefixes(self, generate):
        prompt = "A sentence with both a salt and a key. " * 3
        for salt, key in (("s", "1"), ("s", "2"), ("s1", "")):
            assert generate(text=prompt, cache_salt=salt, extra_key=key)["meta_info"]["cached_tokens"] == 0
        assert generate(text=prompt, cache_salt="s", extra_key="2")["meta_info"]["cached_tokens"] > 0

    @pytest.mark.parametrize(
        ("params", "reason"),
        [
            ({"max_new_tokens": 2, "ignore_eos": True}, {"type": "length", "length": 2}),
            ({"stop": "is"}, {"type": "stop", "matched": "is"}),
        ],
    )
    def test_the_finish_reason_states_why_generation_ended(self, generate, params, reason):
        answer = generate(
            text="What is the capital of France?", sampling_params=GREEDY | {"max_new_tokens": 64} | params
        )
        assert answer["meta_info"]["finish_reason"]["type"] == reason["type"]
        if reason["type"] == "length":
            assert answer["meta_info"]["finish_reason"] == reason

    def test_a_matched_stop_token_is_reported_by_id(self, generate):
        first = generate(text=PROMPT)["output_ids"][0]
        answer = generate(text=PROMPT, sampling_params=GREEDY | {"stop_token_ids": [first]})
        assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": first}
        assert answer["text"] == ""

    @pytest.mark.parametrize("keep", [False, True])
    @pytest.mark.parametrize("pattern", ["[A-Z][a-z]{2}", ["zz+", "[a-z][.,]"]])
    def test_a_stop_regex_ends_the_text(self, client, generate, pattern, keep):
        params = GREEDY | {"max_new_tokens": 40}
        whole = generate(text=PROMPT, sampling_params=params)["text"]
        params |= {"stop_regex": pattern, "no_stop_trim": keep}
        used = pattern if isinstance(pattern, str) else pattern[1]
        match = re.search(used, whole)
        answer = generate(text=PROMPT, sampling_params=params)
        assert answer["text"] == whole[: match.end() if keep else match.start()]
        assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": used}
        texts = [event["text"] for event in events(client, text=PROMPT, sampling_params=params)]
        assert texts[-1] == answer["text"]
        assert all(answer["text"].startswith(text) for text in texts)

    def test_no_stop_trim_keeps_the_stop_string(self, generate):
        text = generate(text=PROMPT)["text"]
        stop = text.strip()[0]
        trimmed, kept = (
            generate(text=PROMPT, sampling_params=GREEDY | {"stop": [stop], "no_stop_trim": keep})
            for keep in (False, True)
        )
        assert trimmed["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
        assert kept["text"] == trimmed["text"] + stop

    def test_zero_new_tokens_only_cache_the_prompt(self, generate):
        prompt = "Computed for the cache alone. " * 3
        greedy = {"max_new_tokens": 0, "temperature": 0}
        answer = generate(text=prompt, sampling_params=greedy, return_logprob=True, logprob_start_len=0)
        assert (answer["text"], answer["output_ids"]) == ("", [])
        assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 0}
        assert answer["meta_info"]["completion_tokens"] == 0
        (next_token,) = answer["meta_info"]["output_token_logprobs"]
        assert [next_token[1]] == generate(text=prompt, sampling_params=greedy | {"max_new_tokens": 1})["output_ids"]
        assert answer["meta_info"]["output_token_logprobs_length"] == 1
        assert len(answer["meta_info"]["input_token_logprobs"]) == answer["meta_info"]["prompt_tokens"]
        assert generate(text=prompt)["meta_info"]["cached_tokens"] > 0

    def test_null_means_the_default(self, generate):
        nulls = dict.fromkeys(["top_p", "top_k", "stop", "n", "json_schema", "stop_regex", "min_p", "sampling_seed"])
        assert generate(text=PROMPT, sampling_params=GREEDY | nulls, image_data=None, rid=None) is not None

    @pytest.mark.parametrize(
        ("native", "ours"),
        [
            ({"top_k": -1, "sampling_seed": 7}, {"seed": 7}),
            ({"top_k": 1, "temperature": 2}, {"temperature": 0.0}),
            ({"top_k": 5, "sampling_seed": 7, "temperature": 2}, {"top_k": 5, "seed": 7, "temperature": 2.0}),
            ({"top_p": 0.5, "sampling_seed": 1}, {"top_p": 0.5, "seed": 1}),
            ({"min_p": 0.2, "sampling_seed": 1}, {"min_p": 0.2, "seed": 1}),
            ({"temperature": 0, "repetition_penalty": 1.5}, {"temperature": 0.0, "repetition_penalty": 1.5}),
            ({"temperature": 0, "frequency_penalty": 1}, {"temperature": 0.0, "frequency_penalty": 1.0}),
            ({"temperature": 0, "presence_penalty": 2.0}, {"temperature": 0.0, "presence_penalty": 2.0}),
            ({"temperature": 0, "min_new_tokens": 12}, {"temperature": 0.0, "min_tokens": 12}),
            ({"temperature": 0, "skip_special_tokens": False}, {"temperature": 0.0, "skip_special_tokens": False}),
            ({"temperature": 0, "logit_bias": {"40": 100}}, {"temperature": 0.0, "logit_bias": {40: 100.0}}),
            ({"temperature": 0, "regex": "[A-Z]{3}"}, {"temperature": 0.0, "regex": "[A-Z]{3}"}),
            (
                {"temperature": 0, "json_schema": {"type": "boolean"}},
                {"temperature": 0.0, "json_schema": '{"type": "boolean"}'},
            ),
            (
                {"temperature": 0, "json_schema": {"type": "null", "not": {}}, "strict": False},
                {"temperature": 0.0, "json_schema": '{"type": "null", "not": {}}', "strict": False},
            ),
            (
                {"temperature": 0, "ebnf": 'root ::= "yes" | "no"'},
                {"temperature": 0.0, "ebnf": 'root ::= "yes" | "no"'},
            ),
        ],
    )
    def test_sampling_parameters_have_the_effect_of_the_engines(self, generate, engine, native, ours):
        (expected,) = engine.generate(PROMPT, SamplingParams(max_tokens=16, **ours))
        answer = generate(text=PROMPT, sampling_params={"max_new_tokens": 16} | native)
        assert answer["output_ids"] == list(expected.token_ids)
        assert answer["text"] == expected.text


class TestLists:
    def test_several_prompts_are_answered_in_their_order(self, generate):
        prompts = ["One", "Two words", "Now three words"]
        answers = generate(text=prompts)
        assert [answer["text"] for answer in answers] == [generate(text=prompt)["text"] for prompt in prompts]

    def test_a_list_of_one_prompt_is_answered_by_a_list(self, generate):
        assert len(generate(text=["One"])) == 1
        assert len(generate(input_ids=[[1, 2, 3]])) == 1

    def test_completions_are_flattened_prompt_by_prompt(self, generate):
        params = {"temperature": 0, "max_new_tokens": 4, "n": 2}
        answers = generate(text=["One", "Two words"], sampling_params=params)
        assert len(answers) == 4
        assert (
            answers[0]["output_ids"]
            == answers[1]["output_ids"]
            == generate(text="One", sampling_params=params)[0]["output_ids"]
        )
        assert len({answer["meta_info"]["id"] for answer in answers}) == 2

    def test_each_completion_reports_its_own_forced_tokens(self, client, generate, engine):
        fields = {"regex": "[ab]{1,9}, and so it was said", "seed": 3, "n": 3}
        (output,) = engine.generate(PROMPT, SamplingParams(max_tokens=40, **fields))
        params = {"max_new_tokens": 40, "sampling_seed": fields.pop("seed"), **fields}
        counts = [
            answer["meta_info"]["jump_forward_tokens"] for answer in generate(text=PROMPT, sampling_params=params)
        ]
        last = {event["index"]: event for event in events(client, text=PROMPT, sampling_params=params)}
        assert counts == [completion.jump_forward_tokens for completion in output.completions]
        assert counts == [last[i]["meta_info"]["jump_forward_tokens"] for i in range(3)]
        assert sum(counts) == output.usage.jump_forward_tokens > max(counts) > 0

    def test_a_request_may_disable_jump_forward(self, generate):
        params = {"regex": "[ab]{1,9}, and so it was said", "max_new_tokens": 40, "sampling_seed": 3}
        answers = [generate(text=PROMPT, sampling_params=params | {"jump_forward": it}) for it in (None, True, False)]
        counts = [answer["meta_info"]["jump_forward_tokens"] for answer in answers]
        assert counts[0] == counts[1] > counts[2] == 0

    def test_each_prompt_may_have_its_own_parameters(self, generate):
        params = [{"temperature": 0, "max_new_tokens": n, "ignore_eos": True} for n in (2, 5)]
        answers = generate(text=["a", "b"], sampling_params=params, return_logprob=[True, False], rid=["r-a", "r-b"])
        assert [len(answer["output_ids"]) for answer in answers] == [2, 5]
        assert ["output_token_logprobs" in answer["meta_info"] for answer in answers] == [True, False]
        assert [answer["meta_info"]["id"] for answer in answers] == ["r-a", "r-b"]

    def test_one_id_for_several_prompts_is_numbered(self, generate):
        assert [answer["meta_info"]["id"] for answer in generate(text=["a", "b"], rid="x")] == ["x_0", "x_1"]


class TestLogprobs:
    def test_logprobs_are_those_of_the_engine(self, generate, engine):
        (expected,) = engine.generate(
            PROMPT, SamplingParams(temperature=0, max_tokens=8, logprobs=3, prompt_logprobs=3)
        )
        meta = generate(text=PROMPT, return_logprob=True, logprob_start_len=0, top_logprobs_num=3)["meta_info"]
        assert [entry[1] for entry in meta["output_token_logprobs"]] == list(expected.token_ids)
        assert [entry[0] for entry in meta["output_token_logprobs"]] == pytest.approx(
            [entry.logprob for entry in expected.logprobs], abs=1e-3
        )
        assert [entry[1] for entry in meta["input_token_logprobs"]] == list(expected.prompt_token_ids)
        assert meta["input_token_logprobs"][0] == [None, expected.prompt_token_ids[0], None]
        assert [entry[0] for entry in meta["input_token_logprobs"][1:]] == pytest.approx(
            [entry.logprob for entry in expected.prompt_logprobs[1:]], abs=1e-3
        )
        assert meta["input_top_logprobs"][0] is None
        tops = [[token_id for token_id, _ in entry.top] for entry in expected.logprobs]
        assert [[rival[1] for rival in top] for top in meta["output_top_logprobs"]] == tops
        assert len(meta["input_top_logprobs"]) == len(meta["input_token_logprobs"])

    def test_requested_tokens_have_logprobs_at_every_position(self, client, generate, engine):
        wanted = [300, 7, 300]
        params = SamplingParams(temperature=0, max_tokens=8, logprobs=0, prompt_logprobs=0, logprob_token_ids=wanted)
        (expected,) = engine.generate(PROMPT, params)
        body = {"text": PROMPT, "return_logprob": True, "logprob_start_len": 0, "token_ids_logprob": wanted}
        meta = generate(**body)["meta_info"]
        inputs, outputs = meta["input_token_ids_logprobs"], meta["output_token_ids_logprobs"]
        assert inputs[0] is None
        assert len(inputs) == len(meta["input_token_logprobs"])
        assert len(outputs) == len(meta["output_token_logprobs"])
        entries = [*expected.prompt_logprobs[1:], *expected.logprobs]
        for found, entry in zip([*inputs[1:], *outputs], entries, strict=True):
            assert [token_id for _, token_id, _ in found] == wanted
            assert [value for value, _, _ in found] == pytest.approx(list(entry.requested), abs=1e-3)
        assert "output_top_logprobs" not in meta
        last = events(client, **body)[-1]["meta_info"]
        assert [[e[1] for e in row] for row in last["output_token_ids_logprobs"]] == [wanted] * len(outputs)
        text = generate(**body | {"return_text_in_logprobs": True})["meta_info"]["output_token_ids_logprobs"][0][0][2]
        assert text == engine.tokenizer.decode([300])

    def test_each_prompt_may_request_its_own_tokens(self, generate):
        answers = generate(text=["a", "b", "c"], return_logprob=True, token_ids_logprob=[[5], None, [6, 7]])
        ids = [
            None if (rows := answer["meta_info"].get("output_token_ids_logprobs")) is None else [e[1] for e in rows[0]]
            for answer in answers
        ]
        assert ids == [[5], None, [6, 7]]
        assert "output_token_ids_logprobs" not in generate(text="a", token_ids_logprob=[5])["meta_info"]

    def test_by_default_only_output_tokens_have_logprobs(self, generate):
        meta = generate(text=PROMPT, return_logprob=True)["meta_info"]
        assert meta["input_token_logprobs"] == []
        assert len(meta["output_token_logprobs"]) == meta["completion_tokens"]
        assert "output_top_logprobs" not in meta

    def test_the_prompts_logprobs_begin_at_the_requested_position(self, generate):
        whole = generate(text=PROMPT, return_logprob=True, logprob_start_len=0)["meta_info"]["input_token_logprobs"]
        part = generate(text=PROMPT, return_logprob=True, logprob_start_len=2)["meta_info"]["input_token_logprobs"]
        assert part[0] == [None, whole[2][1], None]
        assert [entry[1] for entry in part] == [entry[1] for entry in whole[2:]]
        assert [entry[0] for entry in part[1:]] == pytest.approx([entry[0] for entry in whole[3:]], abs=1e-3)

    def test_tokens_before_the_start_of_logprobs_may_be_cached(self, client, generate):
        prompt = {"text": "The place from which log-probabilities are wanted", "sampling_params": {"max_new_tokens": 0}}
        client.post("/flush_cache")
        length = generate(**prompt)["meta_info"]["prompt_tokens"]
        for start in (length - 2, length):
            meta = generate(**prompt, return_logprob=True, logprob_start_len=start)["meta_info"]
            assert meta["cached_tokens"] == min(start, length - 1)
            assert len(meta["input_token_logprobs"]) == length - start

    def test_texts_of_logprobs_are_returned_on_request(self, generate, engine):
        meta = generate(text=PROMPT, return_logprob=True, return_text_in_logprobs=True, top_logprobs_num=1)["meta_info"]
        for _, token_id, text in meta["output_token_logprobs"]:
            assert text == engine.tokenizer.decode([token_id], skip_special_tokens=False)
        assert all(isinstance(top[0][2], str) for top in meta["output_top_logprobs"])

    def test_a_start_after_the_end_of_the_prompt_is_refused(self, refused):
        assert "logprob_start_len" in refused(text=PROMPT, return_logprob=True, logprob_start_len=10_000)


class TestStream:
    def test_events_are_cumulative_and_the_last_one_is_the_whole_answer(self, client, generate):
        stream = events(client, text=PROMPT)
        whole = generate(text=PROMPT)
        for earlier, later in itertools.pairwise(stream):
            assert later["text"].startswith(earlier["text"])
            assert later["output_ids"][: len(earlier["output_ids"])] == earlier["output_ids"]
            assert earlier["meta_info"]["finish_reason"] is None
        assert stream[-1]["text"] == whole["text"]
        assert stream[-1]["output_ids"] == whole["output_ids"]
        assert stream[-1]["meta_info"]["finish_reason"] == whole["meta_info"]["finish_reason"]
        assert "index" not in stream[-1]

    def test_logprobs_are_cumulative_too(self, client):
        stream = events(client, text=PROMPT, return_logprob=True, logprob_start_len=0, top_logprobs_num=2)
        for event in stream:
            meta = event["meta_info"]
            assert [entry[1] for entry in meta["output_token_logprobs"]] == event["output_ids"]
            assert len(meta["output_top_logprobs"]) == len(event["output_ids"])
            assert len(meta["input_token_logprobs"]) == meta["prompt_tokens"]

    def test_events_of_several_prompts_and_completions_have_an_index(self, client, generate):
        params = {"temperature": 0, "max_new_tokens": 6, "n": 2}
        last = {event["index"]: event for event in events(client, text=["One", "Two words"], sampling_params=params)}
        answers = generate(text=["One", "Two words"], sampling_params=params)
        assert [last[i]["output_ids"] for i in sorted(last)] == [answer["output_ids"] for answer in answers]
        assert all(event["meta_info"]["finish_reason"] is not None for event in last.values())

    def test_an_invalid_request_is_refused_before_its_stream_begins(self, refused):
        assert "max_new_tokens" in refused(text=PROMPT, stream=True, sampling_params={"max_token": 3})

    def test_closing_a_stream_ends_its_request(self, client):
        with client.stream(
            "POST", "/generate", json={"text": PROMPT, "sampling_params": LONG, "stream": True}
        ) as response:
            lines = response.iter_lines()  # the connection would be closed if it were freed
            next(lines)
            assert num_requests(client) == 1
        wait_until(lambda: num_requests(client) == 0, 10, "the end of the request")


class TestAbort:
    def test_an_aborted_request_is_answered_with_its_tokens_so_far(self, client, generate):
        answers = []
        thread = threading.Thread(
            target=lambda: answers.append(generate(text=PROMPT, sampling_params=LONG, rid="to-abort"))
        )
        thread.start()
        wait_until(lambda: num_requests(client) == 1, 10, "the start of the request")
        assert client.post("/abort_request", json={"rid": "to-abort"}).status_code == 200
        thread.join(20)
        (answer,) = answers
        assert answer["meta_info"]["finish_reason"]["type"] == "abort"
        assert answer["meta_info"]["completion_tokens"] < LONG["max_new_tokens"]

    @pytest.mark.parametrize(("known", "shown"), [(1, 0), (3, 1), (5, 3)])
    def test_the_answer_of_an_aborted_request_has_the_logprobs_computed_so_far(self, known, shown):
        token_ids = np.array([5, 6, 7, 8, 9], dtype=np.int32)
        prompt = NativePrompt(token_ids, SamplingParams(logprobs=0, prompt_logprobs=0), logprob_start=2)
        of_prompt = (None, *[TokenLogprob(token_id, -1.0) for token_id in (6, 7, 8, 9)])[:known]
        ended = Completion(0, "", (), FinishReason.ABORT, error="changed my mind", logprobs=())
        output = GatheredOutput((ended,), Usage(5, 0), Timings(), of_prompt)
        request = PreparedRequest("r", token_ids, prompt.params, seed=1)
        meta = AnswerWriter(prompt, request, lambda: 0.0, None).answer(output, 0)["meta_info"]
        assert meta["finish_reason"] == {"type": "abort", "message": "changed my mind"}
        assert [token_id for _, token_id, _ in meta["input_token_logprobs"]] == [7, 8, 9][:shown]

    def test_an_id_in_use_is_refused(self, client, refused):
        body = {"text": PROMPT, "sampling_params": LONG, "stream": True, "rid": "taken"}
        with client.stream("POST", "/generate", json=body) as response:
            lines = response.iter_lines()  # the connection would be closed if it were freed
            next(lines)
            assert "'taken' is in use" in refused(text=PROMPT, rid="taken")


def num_requests(client):
    return sum(load["num_reqs"] for load in client.get("/get_load").json())


class TestRefusals:
    @pytest.mark.parametrize(
        ("body", "said"),
        [
            ({}, "give either text or input_ids, got neither"),
            ({"text": "a", "input_ids": [1]}, "got text and input_ids"),
            ({"text": []}, "text is an empty list"),
            ({"input_ids": []}, "the prompt is empty"),
            ({"text": ""}, "the prompt is empty"),
            ({"text": "\ud800"}, "Unicode"),
            ({"input_ids": [1, "2"]}, "input_ids"),
            ({"input_ids": [10**6]}, "vocabulary"),
            ({"input_ids": [10**30]}, "input_ids"),
            ({"input_ids": [-1]}, "input_ids"),
            ({"text": "a", "sampling_params": {"max_tokens": 5}}, "'max_tokens'; did you mean 'max_new_tokens'"),
            ({"text": "a", "sampling_params": {"stop_regex": "("}}, "stop_regex: '(' is not a regular expression"),
            ({"text": "a", "sampling_params": {"stop_regex": ["x", "a$"]}}, "stop_regex: 'a$' has $, which depends"),
            ({"text": "a", "sampling_params": {"stop_regex": "a*"}}, "matches the empty text"),
            ({"text": "a", "sampling_params": {"stop_regex": r"(a)\1"}}, "has references to groups"),
            ({"text": "a", "sampling_params": {"stop_regex": ["a{200}", "b{200}"]}}, "need 404 states together"),
            ({"text": "a", "sampling_params": {"stop_regex": ["a"] * 17}}, "16"),
            ({"text": "a", "sampling_params": {"stop_regex": "a" * 1025}}, "1024"),
            ({"text": "a", "sampling_params": {"stop_regex": 5}}, "stop_regex"),
            ({"text": "a", "sampling_params": {"beam_width": 4}}, "not supported"),
            ({"text": "a", "sampling_params": {"temperature": -1}}, "temperature"),
            ({"text": "a", "sampling_params": {"temperature": 10**400}}, "temperature"),
            ({"text": "a", "sampling_params": {"top_k": 0}}, "top_k"),
            ({"text": "a", "sampling_params": {"stop": [""]}}, "stop"),
            ({"text": "a", "sampling_params": {"stop": ["a"] * 65}}, "64"),
            ({"text": "a", "sampling_params": {"min_new_tokens": 200}}, "min_tokens"),
            ({"text": "a", "sampling_params": {"logit_bias": {"x": 1}}}, "logit_bias"),
            ({"text": "a", "sampling_params": {"regex": "(", "max_new_tokens": 4}}, "regular expression"),
            ({"text": "a", "sampling_params": {"json_schema": {"type": "\ud800"}}}, "schema"),
            ({"text": "a", "sampling_params": {"json_schema": 1}}, "sampling_params.json_schema: "),
            ({"text": "a", "sampling_params": [{"top_p": 2}]}, "sampling_params.0.top_p: "),
            ({"text": "a", "sampling_params": {"regex": "a", "ebnf": "b"}}, "at most one of"),
            (
                {"text": ["a", "b"], "sampling_params": [{}]},
                "sampling_params: got 1 entries, expected one for each of the 2",
            ),
            ({"text": "a", "sampling_params": {"grammar_backend": "xgramar"}}, "Did you mean 'xgrammar'?"),
            ({"text": "a", "sampling_params": {"grammar_backened": "xgrammar"}}, "did you mean 'grammar_backend'"),
            ({"text": ["a", "b"], "rid": ["x", "x"]}, "'x' is given twice"),
            ({"text": "a", "rid": "\ud800"}, "nicode"),
            ({"text": "a", "cache_salt": "\udfff"}, "nicode"),
            ({"text": "a", "priority": 2**70}, "priority"),
            ({"text": "a", "image_data": "x.png"}, "cannot use pictures"),
            ({"text": "a", "image_data": 5}, "image_data"),
            ({"text": "a", "lora_id": "x"}, "not supported"),
            ({"text": "a", "return_hidden_states": True}, "not supported"),
            ({"text": "a", "top_logprobs_num": 21}, "top_logprobs_num"),
            (
                {"text": "a", "return_logprob": True, "token_ids_logprob": [10**6]},
                "logprob_token_ids: token id 1000000",
            ),
            ({"text": "a", "return_logprob": True, "token_ids_logprob": [1] * 257}, "token_ids_logprob"),
            ({"text": "a", "return_logprob": True, "token_ids_logprob": ["a"]}, "token_ids_logprob"),
            (
                {"text": ["a", "b"], "return_logprob": True, "token_ids_logprob": [[1]]},
                "token_ids_logprob: got 1 entries",
            ),
            ({"text": "a", "streaming": True}, "'streaming'; did you mean 'stream'"),
        ],
    )
    def test_an_invalid_body_is_refused_with_the_name_of_its_field(self, refused, body, said):
        assert said in refused(**body)

    @pytest.mark.parametrize("content", [b"", b"{", b"[1]", b'"text"', b"\xff", b"[" * 100_000])
    def test_content_that_is_no_json_object_is_refused(self, client, content):
        response = client.post("/generate", content=content, headers={"Content-Type": "application/json"})
        assert response.status_code == 400
        assert response.json()["error"]["message"]
