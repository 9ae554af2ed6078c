"""The whole application: the middleware in front of the routes, and the administrator's routes.

A separate server for these tests has keys, a limit of the body size, an allowed origin, a folder for traces and a JSON
log of all levels.
"""

import gzip
import json

import httpx2
import pytest

from graftlm.testing.server_process import wait_until

USER_KEY, ADMIN_KEY = "s3cret-of-users", "s3cret-of-admins"
CHAT_PAGE = "https://chat.example"


def post(client, path, **body):
    response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def generate(client):
    return post(client, "/generate", text="The capital of France is", sampling_params={"max_new_tokens": 4})


@pytest.fixture
def profile_dir(keyed_server):
    return keyed_server.profile_dir


@pytest.fixture(scope="module")
def locked(keyed_server):
    return keyed_server


@pytest.fixture(scope="module")
def admin(locked):
    with httpx2.Client(base_url=locked.url, headers={"Authorization": f"Bearer {ADMIN_KEY}"}, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def user(locked):
    with httpx2.Client(base_url=locked.url, headers={"Authorization": f"Bearer {USER_KEY}"}, timeout=60) as client:
        yield client


def test_a_profile_is_a_trace_with_events(admin, profile_dir):
    post(admin, "/start_profile", output_dir="one/two", activities=["CPU"], record_shapes=True)
    generate(admin)
    (file,) = post(admin, "/stop_profile")["files"]
    assert file.startswith(str(profile_dir / "one" / "two"))
    with gzip.open(file, "rt") as trace:
        assert len(json.load(trace)["traceEvents"]) > 10


def test_a_profile_with_a_step_count_stops_by_itself(admin, profile_dir):
    post(admin, "/start_profile", num_steps=2)
    generate(admin)
    (file,) = post(admin, "/stop_profile")["files"]
    with gzip.open(file, "rt") as trace:
        assert json.load(trace)["traceEvents"]


def test_stopping_a_profile_that_was_not_started_is_refused(admin):
    response = admin.post("/stop_profile")
    assert response.status_code == 400
    assert "start one first" in response.json()["error"]["message"]


@pytest.mark.parametrize("name", ["..", "../x", "/etc", "a/../../b", "nul\x00", "\ud800", "x" * 201, "ä" * 200])
def test_traces_are_written_only_inside_the_profile_folder(admin, profile_dir, name):
    before = sorted(profile_dir.parent.iterdir())
    body = json.dumps({"output_dir": name})
    response = admin.post("/start_profile", content=body, headers={"Content-Type": "application/json"})
    assert response.status_code == 400, response.text
    assert sorted(profile_dir.parent.iterdir()) == before


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/flush_cache", None),
        ("/reset_prefix_cache", None),
        ("/pause_generation", {}),
        ("/continue_generation", {}),
        ("/start_profile", {}),
        ("/stop_profile", None),
        ("/pin_prefix", {"text": "x"}),
        ("/unpin_prefix", {"text": "x"}),
        ("/abort_request", {"abort_all": True}),
    ],
)
def test_administrator_routes_require_the_admin_key(locked, user, path, body):
    assert user.post(path, json=body).status_code == 403
    assert httpx2.post(locked.url + path, json=body).status_code == 401


def test_a_client_may_generate_and_abort_its_own_requests(user):
    assert generate(user)["output_ids"]
    post(user, "/abort_request", rid="mine")


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/health", 200),
        ("/health_generate", 200),
        ("/metrics", 401),
        ("/server_info", 401),
        ("/openapi.json", 401),
        ("/nowhere", 401),
    ],
)
def test_without_a_key_only_health_is_answered(locked, path, status):
    assert httpx2.get(locked.url + path).status_code == status


def test_server_info_and_the_log_contain_no_key(user, admin, locked):
    for client in (user, admin):
        response = client.get("/server_info")
        assert response.status_code == 200
        assert "api_key" not in response.text
        assert "s3cret" not in response.text
    assert "debug" in {json.loads(line)["level"] for line in locked.log.splitlines() if line.startswith("{")}
    assert "s3cret" not in locked.log


def test_request_bodies_are_limited_with_and_without_content_length(user):
    def chunks():
        for _ in range(16):
            yield b" " * 1024

    assert user.post("/generate", content=b" " * 5000).status_code == 413
    response = user.post("/generate", content=chunks(), headers={"Content-Type": "application/json"})
    assert response.status_code == 413
    assert response.json()["error"]["message"]
    assert generate(user)["text"]


def test_a_post_from_a_page_of_another_site_is_refused(user):
    response = user.post("/generate", json={"text": "a"}, headers={"Origin": "https://evil.example"})
    assert response.status_code == 403


def test_the_log_has_one_line_per_request_with_its_id(user, locked):
    user.get("/model_info", headers={"X-Request-Id": "log-me"})

    def lines():
        found = [json.loads(line) for line in locked.log.splitlines() if "log-me" in line]
        return [line for line in found if line["logger"] == "graftlm.server.access"]

    wait_until(lambda: len(lines()) == 1, 5, "the line in the log")
    (line,) = lines()
    assert (line["request_id"], line["method"], line["path"], line["status"]) == (
        "log-me",
        "GET",
        "/model_info",
        200,
    )
    assert line["duration_ms"] > 0


def test_a_page_of_an_allowed_origin_may_send_requests_and_read_answers(locked, user):
    wish = {
        "Origin": CHAT_PAGE,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization",
    }
    preflight = httpx2.options(locked.url + "/generate", headers=wish)
    assert preflight.status_code == 200
    assert preflight.headers["access-control-allow-origin"] == CHAT_PAGE
    answer = user.post("/generate", json={"text": "a"}, headers={"Origin": CHAT_PAGE})
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == CHAT_PAGE
    refused = httpx2.get(locked.url + "/server_info", headers={"Origin": CHAT_PAGE})
    assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, CHAT_PAGE)


def test_by_default_no_other_origin_may_read_answers(server):
    response = httpx2.get(server.url + "/model_info", headers={"Origin": CHAT_PAGE})
    assert "access-control-allow-origin" not in response.headers


def test_the_openapi_document_lists_every_native_route_with_bounds(server):
    document = httpx2.get(server.url + "/openapi.json", timeout=60).json()
    assert {
        "/generate",
        "/health",
        "/health_generate",
        "/server_info",
        "/model_info",
        "/get_load",
        "/flush_cache",
        "/pin_prefix",
        "/unpin_prefix",
        "/cache_snapshot",
        "/abort_request",
        "/pause_generation",
        "/continue_generation",
        "/start_profile",
        "/stop_profile",
    } <= set(document["paths"])
    assert "422" not in document["paths"]["/generate"]["post"]["responses"]  # invalid bodies are answered with 400
    assert "429" in document["paths"]["/generate"]["post"]["responses"]
    sampling = document["components"]["schemas"]["SamplingRequest"]
    assert sampling["additionalProperties"] is False
    for name, field in sampling["properties"].items():
        assert field["description"], name
    assert sampling["properties"]["top_p"]["anyOf"][0] == {"type": "number", "exclusiveMinimum": 0, "maximum": 1}


def test_the_openapi_document_has_a_security_scheme_only_if_keys_are_required(server, user):
    assert "securitySchemes" not in httpx2.get(server.url + "/openapi.json").json()["components"]
    assert user.get("/openapi.json").json()["components"]["securitySchemes"]["HTTPBearer"]["scheme"] == "bearer"


@pytest.mark.parametrize(
    ("method", "path", "status"), [("GET", "/nowhere", 404), ("DELETE", "/generate", 405), ("GET", "/docs", 404)]
)
def test_unknown_paths_and_methods_get_errors_of_the_same_form(server, method, path, status):
    response = httpx2.request(method, server.url + path)
    assert response.status_code == status
    assert response.json()["error"]["message"]
    assert response.headers["x-request-id"]


@pytest.mark.parametrize("length", [10_000, pytest.param(100_000, marks=pytest.mark.full)])
def test_no_error_repeats_a_long_input(server, length):
    """Send a long text in each field of each route, and a long unknown field and a long query to each route."""
    long, num_errors = "x" * length, 0
    with httpx2.Client(base_url=server.url, timeout=60) as client:
        document = client.get("/openapi.json").json()
        for path, methods in document["paths"].items():
            for method, about in methods.items() if path != "/pause_generation" else ():
                for body in long_bodies(about, document, long):
                    place = path.replace("{model}", long[:8000])
                    answer = client.request(method, place, params={long[:1000]: long[:20_000]}, json=body)
                    if answer.status_code >= 400:
                        num_errors += 1
                        assert len(answer.content) < 4096, (method, path, body)
    assert num_errors > 50
    assert max(map(len, server.log.splitlines())) < 4096


def long_bodies(operation, document, long):
    """Return bodies of an operation that are valid except for one long field; None for an operation without a body."""
    schema = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
    if not schema:
        return [None]
    names = fields(schema, document)
    right = {"prompt": "a", "text": "a", "input": "a", "messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
    right = {name: value for name, value in right.items() if name in names}
    bodies = [right | {name: long} for name in [*names, long]]
    if "sampling_params" in names:
        bodies += [right | {"sampling_params": {name: long}} for name in ("regex", "stop", "json_schema", long)]
    return bodies


def fields(schema, document):
    """Return the names of the fields of a body's schema."""
    if "$ref" in schema:
        schema = document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    found = set(schema.get("properties", ()))
    return sorted(found.union(*(fields(part, document) for part in schema.get("anyOf", ()))))
