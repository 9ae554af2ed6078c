"""A server behind the language: its connections and its refusals."""

import subprocess
import sys

import pytest

from graftlm import RuntimeEndpoint, function, gen
from graftlm.errors import (
    QueueFullError,
    RequestError,
    RequestFailedError,
    UnavailableError,
    UnsupportedFeatureError,
)
from graftlm.lang.backends.endpoint import _error_of

SCRIPT = """
import sys
from graftlm import RuntimeEndpoint, function, gen, set_default_backend

set_default_backend(RuntimeEndpoint(sys.argv[1]))
print(function(lambda s: s.__iadd__("1 + 1 =" + gen("x", max_tokens=3))).run(temperature=0)["x"])
"""


def test_a_process_that_closes_nothing_ends_quietly(server):
    done = subprocess.run([sys.executable, "-c", SCRIPT, server.url], capture_output=True, text=True, timeout=60)
    assert done.stderr == ""
    assert done.stdout.strip()


def test_a_closed_endpoint_opens_anew(server):
    program = function(lambda s: s.__iadd__("1 + 1 =" + gen("x", max_tokens=3)))
    with RuntimeEndpoint(server.url) as endpoint:
        first = program.run(temperature=0, backend=endpoint)
        endpoint.close()
        assert program.run(temperature=0, backend=endpoint).text() == first.text()


@pytest.mark.parametrize(
    ("status", "body", "kind"),
    [
        (400, {"error": {"message": "why"}}, RequestError),
        (404, "why", UnsupportedFeatureError),
        (429, {"message": "why"}, QueueFullError),
        (500, {"error": "why"}, RequestFailedError),
        (503, {"error": {"message": "why"}}, UnavailableError),
    ],
)
def test_refusals_become_the_errors_of_an_engine(status, body, kind):
    error = _error_of(status, body)
    assert type(error) is kind
    assert "why" in str(error)
    assert str(status) in str(error)
