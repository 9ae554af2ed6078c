"""A batch survives SIGKILL; `python tests/server/batch_kills.py` is the long form."""

import importlib.util
from pathlib import Path

import pytest


def load_script():
    spec = importlib.util.spec_from_file_location("batch_kills", Path(__file__).parents[1] / "batch_kills.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("num_requests", "num_kills"), [(60, 1), pytest.param(2000, 5, marks=pytest.mark.full)])
def test_each_request_of_a_killed_batch_is_answered_once(num_requests, num_kills):
    script = load_script()
    batch, results, _ = script.run_batch(num_requests, num_kills, seed=3)
    assert script.check(batch, results, num_requests) == []
