"""The middleware over tiny applications, spoken to in raw ASGI: chunked bodies and odd headers need no client."""

import json
import logging
from dataclasses import dataclass, field

import pytest
from pydantic import SecretStr
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.routing import Route

from graftlm.logs import request_id_var
from graftlm.server.errors import install_error_handlers
from graftlm.server.middleware import ApiKeyAuth, BodyLimit, OriginGuard, RequestLog, require_admin


@dataclass
class Answer:
    status: int | None = None
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""

    @property
    def json(self):
        return json.loads(self.body)


async def call(app, method="GET", path="/", headers=(), chunks=(b"",)):
    """Send a request, its body in chunks, and return the answer."""
    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "scheme": "http",
        "headers": [(name.lower().encode(), value.encode("latin-1")) for name, value in headers],
    }
    left = list(chunks)

    async def receive():
        if not left:
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": left.pop(0), "more_body": bool(left)}

    answer = Answer()

    async def send(message):
        if message["type"] == "http.response.start":
            answer.status = message["status"]
            answer.headers = {name.decode(): value.decode("latin-1") for name, value in message["headers"]}
        else:
            answer.body += message.get("body", b"")

    await app(scope, receive, send)
    return answer


async def ok(scope, receive, send):
    await PlainTextResponse("ok")(scope, receive, send)


async def echo(request: Request):
    body = await request.body()
    return JSONResponse({"size": len(body), "request_id": request.state.request_id})


async def only_admin(request: Request):
    require_admin(request)
    return PlainTextResponse("done")


def application():
    return Starlette(
        routes=[
            Route("/echo", echo, methods=["POST"]),
            Route("/admin", only_admin, methods=["GET", "POST"]),
        ]
    )


class TestRequestLog:
    @pytest.mark.parametrize("request_id", ["abc-123", "x" * 128, "a:b/c=d~{}"])
    async def test_a_sane_id_is_kept(self, request_id):
        answer = await call(RequestLog(application()), "POST", "/echo", [("X-Request-Id", request_id)])
        assert answer.headers["x-request-id"] == request_id
        assert answer.json["request_id"] == request_id

    @pytest.mark.parametrize("request_id", ["", "x" * 129, "two words", "tab\there", "caf\xe9", 'quote\x00"'])
    async def test_any_other_id_is_replaced(self, request_id):
        answer = await call(RequestLog(application()), "POST", "/echo", [("X-Request-Id", request_id)])
        assert answer.headers["x-request-id"] != request_id
        assert answer.json["request_id"] == answer.headers["x-request-id"]

    async def test_every_request_without_an_id_gets_its_own(self):
        answers = [await call(RequestLog(ok)) for _ in range(2)]
        assert answers[0].headers["x-request-id"] != answers[1].headers["x-request-id"]

    async def test_one_line_is_logged_with_its_fields_and_the_encoded_path(self, caplog):
        ticks = iter([1.0, 1.25])
        app = RequestLog(ok, clock=lambda: next(ticks))
        with caplog.at_level(logging.INFO):
            answer = await call(app, "GET", "/a%0Ab", [("X-Request-Id", "r1")])
        (record,) = caplog.records
        assert answer.status == 200
        assert record.getMessage() == "GET /a%0Ab 200 in 250.0 ms"
        assert (record.method, record.status, record.duration_ms) == ("GET", 200, 250.0)

    async def test_lines_of_the_handler_carry_the_id(self):
        seen = []

        async def app(scope, receive, send):
            seen.append(request_id_var.get())
            await ok(scope, receive, send)

        await call(RequestLog(app), headers=[("X-Request-Id", "r2")])
        assert seen == ["r2"]
        assert request_id_var.get() is None

    @pytest.mark.parametrize(("path", "level"), [("/health", logging.DEBUG), ("/generate", logging.INFO)])
    async def test_probes_are_logged_quietly(self, caplog, path, level):
        with caplog.at_level(logging.DEBUG):
            await call(RequestLog(ok), path=path)
        assert [record.levelno for record in caplog.records] == [level]

    async def test_a_failing_handler_is_answered_without_its_details_and_logged_with_them(self, caplog):
        with caplog.at_level(logging.INFO):
            answer = await call(RequestLog(lambda *channel: _fail()), headers=[("X-Request-Id", "r3")])
        assert answer.status == 500
        assert answer.headers["x-request-id"] == "r3"
        assert b"secret" not in answer.body
        assert answer.json["error"]["message"]
        assert "secret details" in caplog.text
        assert "500 in" in caplog.records[-1].getMessage()

    async def test_a_handler_that_fails_half_way_breaks_the_connection(self):
        async def app(scope, receive, send):
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await _fail()

        with pytest.raises(RuntimeError):
            await call(RequestLog(app))

    @pytest.mark.parametrize("raises", [False, True])
    async def test_a_client_that_left_before_its_answer_is_logged_as_499(self, caplog, raises):
        async def app(scope, receive, send):
            if raises:
                raise ClientDisconnect

        with caplog.at_level(logging.INFO):
            answer = await call(RequestLog(app))
        assert answer.status is None
        assert [record.status for record in caplog.records] == [499]


async def _fail():
    raise RuntimeError("secret details")


class TestBodyLimit:
    @pytest.fixture
    def app(self):
        inner = application()
        install_error_handlers(inner)
        return RequestLog(BodyLimit(inner, max_bytes=10))

    @pytest.mark.parametrize("chunks", [(b"",), (b"x" * 10,), (b"x" * 4, b"", b"x" * 6)])
    async def test_a_body_up_to_the_limit_passes(self, app, chunks):
        answer = await call(app, "POST", "/echo", chunks=chunks)
        assert answer.json["size"] == sum(map(len, chunks))

    @pytest.mark.parametrize(
        ("headers", "chunks"),
        [
            ([("Content-Length", "11")], ()),
            ([("Content-Length", "9" * 5000)], ()),
            ([("Transfer-Encoding", "chunked")], (b"x" * 5, b"x" * 5, b"x", b"never read")),
            ([("Content-Length", "5")], (b"x" * 11,)),
        ],
        ids=["stated", "absurd", "chunked", "understated"],
    )
    async def test_a_larger_body_is_refused_and_the_connection_closed(self, app, headers, chunks):
        answer = await call(app, "POST", "/echo", headers, chunks)
        assert answer.status == 413
        assert answer.headers["connection"] == "close"
        assert "server.max_body_bytes" in answer.json["error"]["message"]


def bearer(token):
    return [] if token is None else [("Authorization", f"Bearer {token}")]


class TestApiKeyAuth:
    @pytest.mark.parametrize(
        ("api_key", "admin_key", "token", "client_status", "admin_status"),
        [
            (None, None, None, 200, 200),
            (None, None, "anything", 200, 200),
            ("key", None, None, 401, 401),
            ("key", None, "wrong", 401, 401),
            ("key", None, "key ", 200, 200),
            ("key", None, "key", 200, 200),
            (None, "admin", None, 200, 403),
            (None, "admin", "EMPTY", 200, 403),
            (None, "admin", "admin", 200, 200),
            ("key", "admin", None, 401, 401),
            ("key", "admin", "wrong", 401, 401),
            ("key", "admin", "key", 200, 403),
            ("key", "admin", "admin", 200, 200),
            ("same", "same", "same", 200, 200),
        ],
    )
    async def test_each_route_lets_in_whom_it_should(self, api_key, admin_key, token, client_status, admin_status):
        inner = application()
        install_error_handlers(inner)
        keys = {"api_key": api_key and SecretStr(api_key), "admin_api_key": admin_key and SecretStr(admin_key)}
        app = RequestLog(ApiKeyAuth(inner, **keys))
        assert (await call(app, "POST", "/echo", bearer(token))).status == client_status
        assert (await call(app, "POST", "/admin", bearer(token))).status == admin_status

    @pytest.mark.parametrize("header", ["Basic key", "key", "Bearer", "bearer  ", "Bearer k\xe9y"])
    async def test_other_credentials_are_refused_with_the_way_to_send_them(self, header):
        answer = await call(ApiKeyAuth(ok, api_key=SecretStr("key")), headers=[("Authorization", header)])
        assert answer.status == 401
        assert answer.headers["www-authenticate"] == "Bearer"
        assert answer.json["error"]["code"] == "invalid_api_key"

    async def test_the_scheme_may_be_written_in_any_case(self):
        answer = await call(ApiKeyAuth(ok, api_key=SecretStr("key")), headers=[("Authorization", "bEARER key")])
        assert answer.status == 200

    async def test_a_key_may_hold_any_text(self):
        answer = await call(ApiKeyAuth(ok, api_key=SecretStr("kéy")), headers=bearer("kéy".encode().decode("latin-1")))
        assert answer.status == 200

    @pytest.mark.parametrize(("path", "status"), [("/", 200), ("/health", 200), ("/healthy", 401), ("/metrics", 401)])
    async def test_open_paths_need_no_key(self, path, status):
        app = ApiKeyAuth(ok, api_key=SecretStr("key"), open_paths={"/", "/health"})
        assert (await call(app, path=path)).status == status

    async def test_an_open_path_gives_no_admin_rights(self):
        inner = application()
        install_error_handlers(inner)
        app = ApiKeyAuth(inner, api_key=SecretStr("key"), open_paths={"/admin"})
        assert (await call(app, path="/admin")).status == 403


class TestOriginGuard:
    @pytest.mark.parametrize(
        ("listens_on", "host", "origin", "status"),
        [
            ("127.0.0.1", "127.0.0.1:30000", None, 200),
            ("127.0.0.1", "127.0.0.1:30000", "http://127.0.0.1:30000", 200),
            ("127.0.0.1", "localhost:30000", "http://localhost:30000", 200),
            ("127.0.0.1", "[::1]:30000", "http://[::1]:30000", 200),
            ("127.0.0.1", "127.0.0.1:30000", "http://127.0.0.1:8080", 403),
            ("127.0.0.1", "127.0.0.1:30000", "https://evil.example", 403),
            ("127.0.0.1", "127.0.0.1:30000", "null", 403),
            ("127.0.0.1", "127.0.0.1:30000", "", 403),
            ("127.0.0.1", "127.0.0.1:30000", "http://[", 403),
            # A name of the attacker's that points to this machine.
            ("127.0.0.1", "evil.example:30000", "http://evil.example:30000", 403),
            ("0.0.0.0", "llm.example:30000", "http://llm.example:30000", 200),
            ("0.0.0.0", "llm.example", "https://llm.example", 200),
            ("0.0.0.0", "llm.example:30000", "https://llm.example", 403),
            ("0.0.0.0", "llm.example", "https://chat.example", 200),
            ("0.0.0.0", "llm.example", "https://chat.example:444", 403),
        ],
    )
    async def test_a_page_may_post_to_its_own_site_only(self, listens_on, host, origin, status):
        app = OriginGuard(ok, listens_on, allowed=["https://chat.example/"])
        headers = [("Host", host)] + ([] if origin is None else [("Origin", origin)])
        assert (await call(app, "POST", "/generate", headers)).status == status

    @pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS"])
    async def test_reading_is_free(self, method):
        app = OriginGuard(ok, "127.0.0.1")
        assert (await call(app, method, headers=[("Origin", "https://evil.example")])).status == 200

    @pytest.mark.parametrize(
        ("header", "status"),
        [
            (("Sec-Fetch-Site", "cross-site"), 403),
            (("Sec-Fetch-Site", "same-site"), 403),
            (("Sec-Fetch-Site", "same-origin"), 200),
            (("Sec-Fetch-Site", "none"), 200),
            (("Origin", "https://evil.example"), 403),
            (("Accept", "*/*"), 200),
        ],
    )
    async def test_a_get_that_changes_something_is_guarded_too(self, header, status):
        app = OriginGuard(ok, "127.0.0.1", guarded_paths={"/flush_cache"})
        assert (await call(app, "GET", "/flush_cache", [("Host", "localhost"), header])).status == status

    async def test_a_star_allows_every_origin(self):
        app = OriginGuard(ok, "127.0.0.1", allowed=["*"])
        assert (await call(app, "POST", headers=[("Origin", "https://any.example")])).status == 200

    async def test_the_refusal_names_the_origin_and_the_setting(self):
        answer = await call(OriginGuard(ok, "127.0.0.1"), "POST", headers=[("Origin", "https://evil.example")])
        assert "https://evil.example" in answer.json["error"]["message"]
        assert "server.cors_origins" in answer.json["error"]["message"]
