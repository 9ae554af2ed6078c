"""Results are appended once, and a broken last line is removed."""

import json

import pytest

from graftlm.server.batches.result_files import ResultFiles


@pytest.fixture
def paths(tmp_path):
    return tmp_path / "output.jsonl", tmp_path / "errors.jsonl"


def ids_in(path):
    return [json.loads(line)["custom_id"] for line in path.read_bytes().splitlines()]


def test_results_are_counted_and_found_again(paths):
    with ResultFiles(*paths) as results:
        results.add("a", {"response": {"text": "\u2028 \n"}}, is_error=False)
        results.add("b", {"error": {}}, is_error=True)
    with ResultFiles(*paths) as results:
        assert (results.num_completed, results.num_failed) == (1, 1)
        assert [results.has(name) for name in "abc"] == [True, True, False]
        results.add("c", {}, is_error=False)
    assert ids_in(paths[0]) == ["a", "c"]
    assert ids_in(paths[1]) == ["b"]


@pytest.mark.parametrize("cut", [1, 5, 14])
@pytest.mark.parametrize("broken", [0, 1])
def test_an_incomplete_last_line_is_removed_and_answered_again(paths, broken, cut):
    with ResultFiles(*paths) as results:
        for name in "ab":
            results.add(name, {}, is_error=bool(broken))
    content = paths[broken].read_bytes()
    paths[broken].write_bytes(content[:-cut])
    with ResultFiles(*paths) as results:
        assert [results.has(name) for name in "ab"] == [True, False]
        results.add("b", {}, is_error=bool(broken))
    assert paths[broken].read_bytes() == content
