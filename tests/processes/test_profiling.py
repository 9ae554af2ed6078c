"""Profiles of real work, and the behaviour when a profile cannot be made."""

import gzip
import json
import shutil

import pytest
import torch

from graftlm.errors import RequestError
from graftlm.processes.profiling import Profiler


def here(function):
    function()


def work():
    return torch.ones(8, 8) @ torch.ones(8, 8)


def names_in(path):
    with gzip.open(path) as file:
        return {event.get("name") for event in json.load(file)["traceEvents"]}


def test_a_profile_contains_the_operations_between_start_and_stop(tmp_path):
    profiler = Profiler(here, "scheduler-0")
    profiler.start(str(tmp_path / "deep" / "folder"), activities=["CPU"])
    work()
    profiler.step_done()
    (path,) = profiler.stop()
    assert path.startswith(str(tmp_path / "deep" / "folder" / "scheduler-0-"))
    assert "aten::matmul" in names_in(path)


def test_a_profile_of_n_steps_stops_itself_and_stop_returns_its_path_once(tmp_path):
    profiler = Profiler(here, "scheduler-0")
    profiler.start(str(tmp_path), num_steps=2, activities=["CPU"])
    profiler.step_done()
    assert list(tmp_path.iterdir()) == []
    profiler.step_done()
    (path,) = tmp_path.iterdir()
    profiler.step_done()
    assert profiler.stop() == [str(path)]
    with pytest.raises(RequestError, match="no profile is being recorded"):
        profiler.stop()


def test_only_one_profile_is_recorded_at_a_time(tmp_path):
    profiler = Profiler(here, "scheduler-0")
    with pytest.raises(RequestError, match="start one first"):
        profiler.stop()
    profiler.start(str(tmp_path), activities=["CPU"])
    with pytest.raises(RequestError, match="being recorded already"):
        profiler.start(str(tmp_path), activities=["CPU"])
    assert len(profiler.stop()) == 1


def test_a_profile_that_cannot_start_does_not_block_the_next(tmp_path):
    refusals = [RuntimeError("another profiler is active")]

    def run(function):
        if refusals:
            raise refusals.pop()
        function()

    profiler = Profiler(run, "scheduler-0")
    with pytest.raises(RuntimeError, match="another profiler"):
        profiler.start(str(tmp_path), activities=["CPU"])
    profiler.start(str(tmp_path), activities=["CPU"])
    assert len(profiler.stop()) == 1


def test_a_profile_that_cannot_be_written_does_not_stop_the_steps(tmp_path, caplog):
    profiler = Profiler(here, "scheduler-0")
    folder = tmp_path / "gone"
    profiler.start(str(folder), num_steps=1, activities=["CPU"])
    shutil.rmtree(folder)
    profiler.step_done()
    assert "could not be written" in caplog.text
    with pytest.raises(RequestError, match="no profile is being recorded"):
        profiler.stop()
    profiler.start(str(folder), activities=["CPU"])
    assert len(profiler.stop()) == 1
