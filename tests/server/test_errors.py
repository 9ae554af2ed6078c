"""Every exception has a status and a body in OpenAI's form, without internal details."""

import inspect
import json

import pytest
from fastapi import FastAPI, HTTPException
from fastapi.testclient import TestClient
from pydantic import BaseModel

from graftlm import errors
from graftlm.errors import RequestError
from graftlm.server.errors import ApiError, error_json, error_response, install_error_handlers, status_of

STATUSES = {
    "RequestError": 400,
    "SamplingParamsError": 400,
    "GrammarError": 400,
    "InvalidPromptError": 400,
    "PromptTooLongError": 400,
    "NeverFitsError": 400,
    "UnsupportedFeatureError": 400,
    "AdapterError": 400,
    "MediaError": 400,
    "AdapterNotFoundError": 404,
    "RequestTimeoutError": 408,
    "QueueFullError": 429,
    "RequestFailedError": 500,
    "EngineClosedError": 503,
    "UnavailableError": 503,
}
CLASSES = {
    name: kind for name, kind in inspect.getmembers(errors, inspect.isclass) if kind.__module__ == errors.__name__
}


def body_of(error):
    return json.loads(error_json(error))["error"]


@pytest.mark.parametrize("name", CLASSES)
def test_each_error_has_its_status_and_internal_errors_hide_their_message(name):
    error = CLASSES[name]("page 7 has two owners")
    status = STATUSES.get(name, 500)
    assert status_of(error) == status
    told = "page 7 has two owners" if name in STATUSES else "the server failed to handle the request"
    assert body_of(error)["message"] == told


@pytest.mark.parametrize(
    "error", [KeyError("secret"), TimeoutError("secret"), OSError(5, "secret"), ValueError("secret")]
)
def test_an_unexpected_exception_is_a_500_without_details(error):
    assert status_of(error) == 500
    assert "secret" not in error_json(error).decode()


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (403, "permission_error"),
        (404, "not_found_error"),
        (405, "invalid_request_error"),
        (408, "timeout_error"),
        (413, "invalid_request_error"),
        (429, "rate_limit_error"),
        (500, "server_error"),
        (503, "service_unavailable_error"),
    ],
)
def test_each_status_has_a_type_and_some_have_retry_after(status, kind):
    answer = error_response(status, "no", param="p", code="c")
    assert json.loads(answer.body) == {"error": {"message": "no", "type": kind, "param": "p", "code": "c"}}
    assert answer.headers["content-type"] == "application/json"
    assert ("retry-after" in answer.headers) == (status in (429, 503))


def test_half_a_surrogate_pair_can_be_part_of_an_error():
    error = ApiError(404, "no model \ud800", param="\udfff", code="model_not_found")
    assert body_of(error) == {
        "message": "no model \\ud800",
        "type": "not_found_error",
        "param": "\\udfff",
        "code": "model_not_found",
    }


class Inner(BaseModel):
    number: int


class Body(BaseModel, extra="forbid"):
    name: str
    inner: list[Inner] = []


@pytest.fixture(scope="module")
def client():
    app = FastAPI()
    install_error_handlers(app)

    @app.post("/things")
    async def things(body: Body, limit: int = 1):
        return {}

    @app.get("/raise/{name}")
    async def fail(name: str):
        raise CLASSES[name]("page 7 has two owners")

    @app.get("/busy")
    async def busy():
        raise HTTPException(503, "busy", headers={"Retry-After": "30"})

    return TestClient(app, raise_server_exceptions=False)


@pytest.mark.parametrize(
    ("body", "query", "message", "param", "code"),
    [
        ("{", "", "the body is not JSON", None, "invalid_json"),
        ("", "", "the body must be a JSON object", None, None),
        ("[]", "", "", None, None),
        ("{}", "", "name: Field required", "name", None),
        ('{"name": 5}', "", "name: Input should be a valid string", "name", None),
        ('{"name": "a", "inner": [{"number": 1}, {"number": "x"}]}', "", "inner.1.number: ", "inner.1.number", None),
        ('{"name": "a", "nmae": 1}', "", "Unrecognized request argument supplied: nmae", "nmae", "unknown_parameter"),
        ('{"name": "a"}', "?limit=x", "limit: ", "limit", None),
    ],
)
def test_an_invalid_body_is_refused_with_the_first_wrong_field(client, body, query, message, param, code):
    answer = client.post("/things" + query, content=body, headers={"Content-Type": "application/json"})
    error = answer.json()["error"]
    assert (answer.status_code, error["type"]) == (400, "invalid_request_error")
    assert error["message"].startswith(message)
    assert (error["param"], error["code"]) == (param, code)


@pytest.mark.parametrize(("length", "is_cut"), [(2000, False), (2001, True), (100_000, True)])
def test_a_long_message_is_cut_in_the_middle(length, is_cut):
    message = ("a" * length)[:-6] + " wrong"
    found = body_of(RequestError(message))["message"]
    assert (found != message) is is_cut
    assert len(found) < 2100
    assert found.startswith("aaa")
    assert found.endswith(" wrong")


def test_a_long_field_name_is_cut(client):
    answer = client.post("/things", json={"name": "a", "x" * 5000: 1})
    assert answer.json()["error"]["param"] == "x" * 256
    assert len(answer.content) < 1000


@pytest.mark.parametrize(
    ("name", "logged"), [("RequestFailedError", True), ("InvariantError", True), ("GrammarError", False)]
)
def test_internal_errors_are_logged_with_their_traceback(client, caplog, name, logged):
    answer = client.get(f"/raise/{name}")
    assert answer.status_code == STATUSES.get(name, 500)
    assert bool(caplog.records) == logged
    if logged:
        assert "page 7 has two owners" in caplog.text
        assert "Traceback" in caplog.text


@pytest.mark.parametrize(
    ("method", "path", "status", "headers"),
    [
        ("GET", "/nowhere", 404, {}),
        ("DELETE", "/things", 405, {"allow": "POST"}),
        ("GET", "/busy", 503, {"retry-after": "30"}),
    ],
)
def test_the_frameworks_own_errors_have_the_same_form(client, method, path, status, headers):
    answer = client.request(method, path)
    assert answer.status_code == status
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    assert headers.items() <= dict(answer.headers).items()
