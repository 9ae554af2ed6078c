"""A real server of the bundled model, and servers with faults."""

import socket

import pytest
from aiohttp import web

from graftlm.testing.server_process import ServerProcess


@pytest.fixture(scope="session")
def server():
    """Run `graftlm serve` on a free port; `server.url` is its address."""
    config = {
        "model": "demo",
        "memory": {"kv_tokens": 16384},
        "scheduling": {"max_running_requests": 8, "max_queued_requests": 16},
    }
    with ServerProcess(config, environment={"OMP_NUM_THREADS": "1"}) as it:
        yield it


@pytest.fixture
def refused_url():
    """An address without a server: the port is bound, so that no other program takes it."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{bound.getsockname()[1]}"


@pytest.fixture
async def misbehaving():
    """Return a function that starts a server, with a handler for POST /generate, and returns its address."""
    runners = []

    async def start(handler):
        app = web.Application()
        app.router.add_post("/generate", handler)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        runners.append(runner)
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]
        return f"http://{host}:{port}"

    yield start
    for runner in runners:
        await runner.cleanup()
