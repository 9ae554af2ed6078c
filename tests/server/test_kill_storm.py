"""A short run of the kill storm, and tests of its checks; `make kill-storm` runs it for longer.

In the quick set, test_faults.py kills processes under load, and test_lora.py looks at the answers after that.
"""

import importlib.util
from pathlib import Path
from types import SimpleNamespace

import pytest

spec = importlib.util.spec_from_file_location("kill_storm", Path(__file__).with_name("kill_storm.py"))
kill_storm = importlib.util.module_from_spec(spec)
spec.loader.exec_module(kill_storm)


@pytest.mark.full
def test_processes_killed_under_mixed_load_lose_no_request_and_change_no_answer():
    report = kill_storm.storm(num_kills=2, seed=8, num_clients=3, prompts=kill_storm.PROMPTS[:1])
    assert report.failures == []
    assert report.exit_status == 0
    assert {fault.split(":")[0] for fault in report.faults} == {"scheduler", "detokenizer"}
    answered = {kind for kind, outcome in report.outcomes if outcome == "200"}
    assert {"plain+adapter, at the end", "json_schema, at the end", "regex, at the end", "ebnf, at the end"} <= answered
    assert report.num_sent == report.num_ended > 0


@pytest.fixture
def storm(tmp_path):
    it = kill_storm.Storm(SimpleNamespace(url="http://127.0.0.1:1"), tmp_path, seed=0, num_clients=0)
    it._expected = {("default", request.key): [1, 2] for request in it._greedy_requests}
    return it


@pytest.mark.parametrize(
    ("output_ids", "version", "is_failure"),
    [([1, 2], "default", False), ([1, 3], "default", True), ([1], "default", True)],
)
def test_an_answer_other_than_the_recorded_one_is_a_failure(storm, output_ids, version, is_failure):
    meta = {"finish_reason": {"type": "stop"}, "weight_version": version}
    storm._check(storm._greedy_requests[0], "plain", 200, {"output_ids": output_ids, "meta_info": meta})
    assert bool(storm.report.failures) == is_failure


@pytest.mark.parametrize(("outcome", "is_failure"), [(503, False), (500, True), (404, True), ("cut off", True)])
def test_an_outcome_that_is_no_clear_error_is_a_failure(storm, outcome, is_failure):
    storm.note("plain", outcome)
    assert bool(storm.report.failures) == is_failure


def test_a_server_that_does_not_answer_is_a_failure(storm):
    status, _ = storm._post("/generate", {})
    storm.note("plain", status)
    assert status == "ConnectionError"
    assert len(storm.report.failures) == 1
