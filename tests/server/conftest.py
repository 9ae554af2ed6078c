"""A real server of the bundled model, shared by the tests of this folder."""

import pytest

from graftlm.testing.server_process import ServerProcess


@pytest.fixture(scope="session")
def server():
    """Run `graftlm serve` on a free port; `server.url` is its address."""
    with ServerProcess({"model": "demo", "memory": {"kv_tokens": 32768}}, environment={"OMP_NUM_THREADS": "1"}) as it:
        yield it
