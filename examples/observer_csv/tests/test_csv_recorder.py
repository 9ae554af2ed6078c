"""Tests the recorder in an engine, and the files that it writes."""

import csv

import pytest
from graftlm_csv_recorder import CsvRecorder

from graftlm import Engine, SamplingParams
from graftlm.records import RequestRecord
from graftlm.types import FinishReason, Timings, Usage

GREEDY = SamplingParams(temperature=0, max_tokens=4)


def rows(folder, kind):
    (file,) = folder.glob(f"{kind}-*.csv")
    with file.open(newline="") as lines:
        return list(csv.DictReader(lines))


def test_requests_and_steps_of_an_engine_are_recorded(tmp_path):
    folder = tmp_path / "records"
    recorder = CsvRecorder(folder, clock=lambda: 12.5)
    with recorder, Engine(model="demo", memory={"kv_tokens": 512}, plugins=[recorder]) as engine:
        outputs = engine.generate(["Once upon a time", "What is 2 plus 3?"], GREEDY)
    requests = {row["request_id"]: row for row in rows(folder, "requests")}
    for output in outputs:
        row = requests[output.request_id]
        assert row["time"] == "12.5"
        assert int(row["prompt_tokens"]) == output.usage.prompt_tokens
        assert int(row["completion_tokens"]) == output.usage.completion_tokens
        assert float(row["first_token_s"]) <= float(row["total_s"])
    steps = rows(folder, "steps")
    prefilled = sum(int(row["num_prefill_tokens"]) for row in steps)
    assert prefilled == sum(output.usage.prompt_tokens - output.usage.cached_tokens for output in outputs)


def test_a_second_run_goes_on_in_the_same_file(tmp_path):
    record = RequestRecord("a", FinishReason.STOP, Usage(1, 2), Timings(0.1, 0.2, 0.3), 0)
    for _ in range(2):
        with CsvRecorder(tmp_path) as recorder:
            recorder.request_finished(record)
    assert [row["request_id"] for row in rows(tmp_path, "requests")] == ["a", "a"]


@pytest.mark.parametrize("environment", [{}, {"GRAFTLM_CSV_FOLDER": ""}])
def test_without_a_folder_nothing_is_written(environment, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recorder = CsvRecorder.from_environment(environment)
    recorder.request_finished(RequestRecord("a", FinishReason.STOP, Usage(), Timings(), 0))
    assert list(tmp_path.iterdir()) == []
