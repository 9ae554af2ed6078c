"""The bundled model with both backends of the language."""

import pytest

from graftlm import Engine
from graftlm.lang import EngineBackend, RuntimeEndpoint
from graftlm.testing.server_process import wait_until


@pytest.fixture(scope="session")
def engine():
    """An engine with the bundled model and pages of several tokens."""
    with Engine(model="demo", memory={"kv_tokens": 32768}, cache={"page_size": 4}) as it:
        yield it


@pytest.fixture(scope="session")
def endpoint(server):
    with RuntimeEndpoint(server.url) as it:
        yield it


@pytest.fixture(scope="session")
def in_process(engine):
    return EngineBackend(engine)


@pytest.fixture(params=["in_process", "endpoint"])
def backend(request):
    """Both backends, one after the other."""
    return request.getfixturevalue(request.param)


@pytest.fixture
def num_requests(request, backend):
    """Return a function that counts the backend's unfinished requests."""
    import requests

    if isinstance(backend, EngineBackend):
        engine = request.getfixturevalue("engine")
        return lambda: engine.stats().running_requests + engine.stats().waiting_requests
    url = request.getfixturevalue("server").url
    return lambda: sum(load["num_reqs"] for load in requests.get(f"{url}/get_load", timeout=10).json())


@pytest.fixture
def all_requests_end(num_requests):
    """Return a function that waits until the backend has no unfinished request."""
    return lambda: wait_until(lambda: num_requests() == 0, 10.0, "the end of all requests")


@pytest.fixture
def narrow_engine():
    """An engine whose queue holds four requests."""
    with Engine(model="demo", memory={"kv_tokens": 1024}, scheduling={"max_queued_requests": 4}) as it:
        yield it
