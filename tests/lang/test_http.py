"""HTTP in the language's backends: failures become typed errors, and connections are closed."""

import asyncio
import socket

import pytest
from aiohttp import web

from graftlm.errors import (
    ConfigError,
    EngineError,
    GrammarError,
    PromptTooLongError,
    QueueFullError,
    RequestError,
    RequestFailedError,
    UnavailableError,
    UnsupportedFeatureError,
)
from graftlm.lang.backends.http import HttpClient, _keepalive_socket, refusal
from graftlm.lang.event_loop import shared_loop
from graftlm.testing.app_server import AppServer


def get(coroutine):
    return asyncio.run_coroutine_threadsafe(coroutine, shared_loop()).result(10.0)


@pytest.fixture
def client():
    """A client of a server with one page."""

    async def page(request):
        return web.json_response({"is": "there"})

    async def text(request):
        return web.Response(text="<html>")

    app = web.Application()
    app.router.add_get("/page", page)
    app.router.add_get("/text", text)
    with AppServer(app) as server:
        made = HttpClient(f"{server.url}/", api_key=None, timeout_s=None)
        yield made
        made.close()


def test_the_first_existing_page_is_found(client):
    assert get(client.find("/old", "/page")) == {"is": "there"}
    assert get(client.find("/old", "/older")) is None


def test_an_answer_that_is_not_json_is_an_error(client):
    with pytest.raises(EngineError, match="/text must answer with JSON, got '<html>'"):
        get(client.json("GET", "/text"))


def test_a_closed_client_can_be_closed_again_and_reopened(client):
    for _ in range(2):
        assert get(client.json("GET", "/page"))
        client.close()
        client.close()


def test_a_connection_detects_that_the_other_machine_is_gone():
    with _keepalive_socket((socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", ("127.0.0.1", 1))) as made:
        assert made.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        if hasattr(socket, "TCP_KEEPIDLE"):
            assert 0 < made.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) < 60


@pytest.mark.parametrize(
    ("status", "body", "kind"),
    [
        (400, {"error": {"message": "why"}}, RequestError),
        (400, "why", RequestError),
        (404, "why", UnsupportedFeatureError),
        (404, {"error": {"message": "why", "code": "model_not_found"}}, RequestError),
        (404, {"message": "why", "code": 404, "param": "model"}, RequestError),
        (400, {"error": {"message": "why", "code": "context_length_exceeded"}}, PromptTooLongError),
        (400, {"error": {"message": "why", "code": "invalid_grammar"}}, GrammarError),
        (400, {"error": {"message": "why", "code": ["unsupported"]}}, RequestError),
        (429, {"message": "why"}, QueueFullError),
        (500, {"error": "why"}, RequestFailedError),
        (503, {"error": {"message": "why"}}, UnavailableError),
    ],
)
def test_refusals_become_the_same_errors_as_of_an_engine(status, body, kind):
    error = refusal(status, body)
    assert type(error) is kind
    assert "why" in str(error)
    assert str(status) in str(error)


@pytest.mark.parametrize("url", ["127.0.0.1:30000", "localhost", "ftp://host", "http://", "", None, 30000])
def test_a_malformed_url_is_refused_at_once(url):
    with pytest.raises(ConfigError, match="base_url must be a URL such as"):
        HttpClient(url, api_key=None, timeout_s=None)
