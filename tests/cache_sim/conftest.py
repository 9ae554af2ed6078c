"""Small traces for the tests of the simulator."""

import json

import pytest

from graftlm.cache_sim import parse_trace
from graftlm.registry import Registry

BLOCK = 4


@pytest.fixture(scope="session")
def make_trace():
    """Return a function that makes a trace; a request is a list of block ids, with 4 tokens per block and `tail` in the
    last one.
    """

    def make(*requests, tail=BLOCK):
        lines = [
            json.dumps({"timestamp": 1000 * i, "input_length": BLOCK * (len(ids) - 1) + tail, "hash_ids": list(ids)})
            for i, ids in enumerate(requests)
        ]
        return parse_trace([line.encode() for line in lines], "here", BLOCK)

    return make


@pytest.fixture(scope="session")
def registry():
    """Return a registry of the installed plugins."""
    return Registry.load()
