import json

import numpy as np
import pytest

from graftlm.cache_sim import parse_trace
from graftlm.processes.trace_lines import FinishedRequest, TraceLines, trace_block_tokens

KEY = b"k" * 32


def ids(*numbers):
    return np.array(numbers, dtype=np.int32)


def lines_of(prompt, *outputs, key=KEY, **fields):
    request = FinishedRequest(ids(*prompt), outputs or ((),), 0.0, **fields)
    return [json.loads(line) for line in TraceLines(key, 4).of(request, 123)]


def line_of(*args, **fields):
    (line,) = lines_of(*args, **fields)
    return line


def test_a_line_has_lengths_and_one_id_per_block():
    line = line_of(range(10), (10, 11, 12), priority=3)
    assert {
        name: line[name] for name in ("timestamp", "input_length", "output_length", "block_tokens", "priority")
    } == {
        "timestamp": 123,
        "input_length": 10,
        "output_length": 3,
        "block_tokens": 4,
        "priority": 3,
    }
    assert (len(line["hash_ids"]), len(line["output_hash_ids"]), line["namespace"]) == (3, 1, "")


def test_equal_prefixes_have_equal_ids_and_different_ones_have_not():
    one, two = line_of(range(12)), line_of([*range(8), 99, 100])
    assert one["hash_ids"][:2] == two["hash_ids"][:2]
    assert one["hash_ids"][2] != two["hash_ids"][2]


def test_equal_tokens_after_a_different_prefix_have_another_id():
    line = line_of([1, 2, 3, 4, 1, 2, 3, 4])
    assert line["hash_ids"][0] != line["hash_ids"][1]


def test_the_next_turn_of_a_chat_starts_with_the_ids_of_the_previous_one():
    first = line_of([1, 2, 3, 4, 5], (6, 7, 8, 9))  # token 9 is never computed
    second = line_of([1, 2, 3, 4, 5, 6, 7, 8, 9, 10])
    assert first["hash_ids"][:1] + first["output_hash_ids"] == second["hash_ids"][:2]


@pytest.mark.parametrize("output", [(), (7,)])
def test_an_output_without_a_computed_token_has_the_prompts_last_block(output):
    line = line_of([1, 2, 3, 4, 5], output)
    assert line["output_hash_ids"] == line["hash_ids"][1:]


def test_each_completion_has_its_own_line():
    one, two = lines_of([1, 2, 3, 4], (5, 6), (7, 8))
    assert one["hash_ids"] == two["hash_ids"]
    assert one["output_hash_ids"] != two["output_hash_ids"]


def test_ids_depend_on_the_key_and_the_namespace():
    lines = [line_of(range(8)), line_of(range(8), key=b"x" * 32), line_of(range(8), namespace="salt")]
    assert len({line["hash_ids"][0] for line in lines}) == 3
    assert lines[2]["namespace"] not in ("", "salt")


def test_ids_are_exact_in_any_json_parser():
    assert all(0 <= number < 2**53 for number in line_of(range(400))["hash_ids"])


@pytest.mark.parametrize(("num_prompt", "num_output"), [(1, 0), (3, 1), (4, 1), (4, 4), (5, 4), (16, 9)])
def test_a_written_line_can_be_read(num_prompt, num_output):
    request = FinishedRequest(ids(*range(num_prompt)), (tuple(range(100, 100 + num_output)),), 0.0)
    (read,) = parse_trace(TraceLines(KEY, 4).of(request, 5), "here").requests
    assert (read.prompt_tokens, read.num_tokens) == (num_prompt, num_prompt + max(num_output - 1, 0))


@pytest.mark.parametrize(("page_size", "block_tokens"), [(1, 16), (16, 16), (64, 64)])
def test_a_block_consists_of_whole_pages(page_size, block_tokens):
    assert trace_block_tokens(page_size) == block_tokens
