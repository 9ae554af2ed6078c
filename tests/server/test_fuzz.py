"""A short run of the fuzzer; `make fuzz` runs it for longer."""

import importlib.util
from pathlib import Path

import pytest
import requests

from graftlm.testing.server_process import ServerProcess


def load_fuzzer():
    spec = importlib.util.spec_from_file_location("fuzz", Path(__file__).with_name("fuzz.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


#: Each case sends a few requests to each operation.
@pytest.mark.full
@pytest.mark.parametrize("num_cases", [1, 120])
def test_no_request_made_from_the_openapi_document_causes_a_server_error(num_cases):
    fuzzer = load_fuzzer()
    with ServerProcess(fuzzer.CONFIG, environment={"OMP_NUM_THREADS": "1"}) as server:
        statuses, failures = fuzzer.fuzz(server.url, num_cases=num_cases, seed=1)
        assert failures == []
        assert sum(statuses.values()) >= max(num_cases, 60)
        assert {200, 400} <= {status for _, status in statuses}
        assert requests.get(server.url + "/health", timeout=5).status_code == 200
