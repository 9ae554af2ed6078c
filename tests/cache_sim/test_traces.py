import json

import pytest

from graftlm.cache_sim import TraceError, parse_trace, read_trace

MOONCAKE = {"timestamp": 500, "input_length": 10, "output_length": 3, "hash_ids": [7, 8, 9]}
OURS = {**MOONCAKE, "block_tokens": 4, "output_hash_ids": [20], "namespace": "ab", "priority": 2}


def parse(*lines, block_tokens=4):
    return parse_trace([json.dumps(line).encode() for line in lines], "t.jsonl", block_tokens)


def test_a_mooncake_line_becomes_a_request():
    (request,) = parse(MOONCAKE).requests
    assert request.time_s == 0.5
    assert request.token_ids(4).tolist() == [0, 0, 0, 0, 1, 1, 1, 1, 2, 2]
    assert (request.prompt_tokens, request.num_tokens, request.namespace, request.priority) == (10, 10, "", 0)


def test_a_graftlm_line_also_has_the_output_without_its_last_token():
    trace = parse(OURS, block_tokens=512)
    (request,) = trace.requests
    assert trace.block_tokens == 4
    assert request.token_ids(4).tolist() == [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2]
    assert (request.prompt_tokens, request.num_tokens, request.namespace, request.priority) == (10, 12, "ab", 2)


def test_equal_ids_give_equal_tokens_in_every_line():
    first, second = parse(MOONCAKE, {**MOONCAKE, "hash_ids": [7, 5, 6]}).requests
    shared = first.token_ids(4) == second.token_ids(4)
    assert shared.tolist() == [True] * 4 + [False] * 6


def test_a_partial_block_differs_from_a_whole_block_with_the_same_id():
    partial, whole = parse(MOONCAKE, {**MOONCAKE, "input_length": 12}).requests
    assert partial.block_ids.tolist() == [0, 1, 2]
    assert whole.block_ids.tolist() == [0, 1, 3]


def test_requests_are_sorted_by_arrival_and_unknown_fields_are_ignored():
    trace = parse(
        {**MOONCAKE, "timestamp": 9, "model": "x"}, {**MOONCAKE, "timestamp": 3}, {**MOONCAKE, "timestamp": 9}
    )
    assert [request.time_s for request in trace.requests] == [0.003, 0.009, 0.009]
    assert trace.prompt_tokens == 30


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{", "t.jsonl:2: not a recorded request: Input data was truncated"),
        (b"\xff", "t.jsonl:2: not a recorded request:"),
        (b"[]", "t.jsonl:2: not a recorded request: Expected `object`"),
        ({"timestamp": 1}, "missing required field `input_length`"),
        ({**MOONCAKE, "input_length": 0}, "Expected `int` >= 1 - at `$.input_length`"),
        ({**MOONCAKE, "hash_ids": ["a"]}, "Expected `int`, got `str` - at `$.hash_ids[0]`"),
        ({**MOONCAKE, "timestamp": "now"}, "at `$.timestamp`"),
        (
            {**MOONCAKE, "hash_ids": [1, 2]},
            "t.jsonl:2: hash_ids has 2 ids, expected 3: blocks 0 to 2 of 10 tokens, with 4 tokens per block. "
            "Check --block-tokens.",
        ),
        ({**MOONCAKE, "output_hash_ids": []}, "output_hash_ids has 0 ids, expected 1: blocks 2 to 2 of 12 tokens"),
        (OURS, "t.jsonl:2: block_tokens is 4, but the first line has None"),
    ],
)
def test_a_bad_line_is_reported_with_its_number(line, message):
    text = line if isinstance(line, bytes) else json.dumps(line).encode()
    with pytest.raises(TraceError) as caught:
        parse_trace([json.dumps(MOONCAKE).encode(), text], "t.jsonl", 4)
    assert message in str(caught.value)


def test_lines_of_different_block_sizes_are_refused():
    with pytest.raises(TraceError, match=r"t\.jsonl:2: block_tokens is 16, but the first line has 4"):
        parse(OURS, {**OURS, "block_tokens": 16})


def test_a_trace_is_read_from_a_file_and_empty_lines_are_skipped(tmp_path):
    path = tmp_path / "some.jsonl"
    path.write_text("\n" + json.dumps(MOONCAKE) + "\n\n")
    trace = read_trace(path, 4)
    assert (trace.name, len(trace.requests)) == ("some", 1)


@pytest.mark.parametrize(("name", "message"), [("none", "cannot read the trace"), ("empty", "the trace is empty")])
def test_a_file_that_is_missing_or_empty_is_an_error(tmp_path, name, message):
    (tmp_path / "empty").write_text("")
    with pytest.raises(TraceError, match=message):
        read_trace(tmp_path / name)
