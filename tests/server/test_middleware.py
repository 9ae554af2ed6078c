"""The middleware around tiny applications, called in raw ASGI: chunked bodies and odd headers need no client."""

import logging

import pytest
from pydantic import SecretStr
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.routing import Route

from graftlm.config import EngineConfig, ServerSettings
from graftlm.errors import ConfigError
from graftlm.logs import request_id_var
from graftlm.server.errors import install_error_handlers
from graftlm.server.http_protocol import TARGET_AUTHORITY
from graftlm.server.middleware import (
    ApiKeyAuth,
    BodyLimit,
    HostGuard,
    OriginGuard,
    RequestLog,
    require_admin,
    require_operator,
)
from graftlm.testing.asgi import call


async def ok(scope, receive, send):
    await PlainTextResponse("ok")(scope, receive, send)


async def echo(request: Request):
    body = await request.body()
    return JSONResponse({"size": len(body), "request_id": request.state.request_id})


async def only_admin(request: Request):
    require_admin(request)
    return PlainTextResponse("done")


async def only_operator(request: Request):
    require_operator(request)
    return PlainTextResponse("done")


def application():
    return Starlette(
        routes=[
            Route("/echo", echo, methods=["POST"]),
            Route("/admin", only_admin, methods=["GET", "POST"]),
            Route("/operator", only_operator, methods=["POST"]),
        ]
    )


class TestRequestLog:
    @pytest.mark.parametrize("request_id", ["abc-123", "x" * 128, "a:b/c=d~{}"])
    async def test_a_valid_request_id_is_kept(self, request_id):
        answer = await call(RequestLog(application()), "POST", "/echo", [("X-Request-Id", request_id)])
        assert answer.headers["x-request-id"] == request_id
        assert answer.json["request_id"] == request_id

    @pytest.mark.parametrize("request_id", ["", "x" * 129, "two words", "tab\there", "caf\xe9", 'quote\x00"'])
    async def test_any_other_request_id_is_replaced(self, request_id):
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

    async def test_log_lines_of_the_handler_have_the_request_id(self):
        seen = []

        async def app(scope, receive, send):
            seen.append(request_id_var.get())
            await ok(scope, receive, send)

        await call(RequestLog(app), headers=[("X-Request-Id", "r2")])
        assert seen == ["r2"]
        assert request_id_var.get() is None

    @pytest.mark.parametrize(("path", "level"), [("/health", logging.DEBUG), ("/generate", logging.INFO)])
    async def test_probes_are_logged_at_level_debug(self, caplog, path, level):
        with caplog.at_level(logging.DEBUG):
            await call(RequestLog(ok), path=path)
        assert [record.levelno for record in caplog.records] == [level]

    async def test_a_failing_handler_is_answered_without_details_and_logged_with_them(self, caplog):
        with caplog.at_level(logging.INFO):
            answer = await call(RequestLog(lambda *channel: _fail()), headers=[("X-Request-Id", "r3")])
        assert answer.status == 500
        assert answer.headers["x-request-id"] == "r3"
        assert b"secret" not in answer.body
        assert answer.json["error"]["message"]
        assert "secret details" in caplog.text
        assert "500 in" in caplog.records[-1].getMessage()

    async def test_a_handler_that_fails_during_its_answer_breaks_the_connection(self):
        async def app(scope, receive, send):
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await _fail()

        with pytest.raises(RuntimeError):
            await call(RequestLog(app))

    @pytest.mark.parametrize("raises", [False, True])
    async def test_a_client_that_disconnected_before_its_answer_is_logged_as_499(self, caplog, raises):
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
    async def test_a_larger_body_is_refused_and_the_connection_is_closed(self, app, headers, chunks):
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
            (None, None, None, 200, 403),
            (None, None, "anything", 200, 403),
            ("key", None, None, 401, 401),
            ("key", None, "wrong", 401, 401),
            ("key", None, "key ", 200, 403),
            ("key", None, "key", 200, 403),
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
    async def test_each_route_admits_the_configured_roles(self, api_key, admin_key, token, client_status, admin_status):
        inner = application()
        install_error_handlers(inner)
        keys = {"api_key": api_key and SecretStr(api_key), "admin_api_key": admin_key and SecretStr(admin_key)}
        app = RequestLog(ApiKeyAuth(inner, **keys))
        assert (await call(app, "POST", "/echo", bearer(token))).status == client_status
        assert (await call(app, "POST", "/admin", bearer(token))).status == admin_status
        assert (await call(app, "POST", "/operator", bearer(token))).status == admin_status

    @pytest.mark.parametrize(
        ("settings", "client", "headers", "operator_status", "admin_status"),
        [
            ({}, "127.0.0.1", {}, 200, 403),
            ({}, "::1", {}, 200, 403),
            ({}, "::ffff:127.0.0.1", {}, 200, 403),
            ({}, "127.0.0.1", {"Host": "localhost:30000"}, 200, 403),
            ({}, "192.0.2.1", {}, 403, 403),
            ({}, None, {}, 403, 403),
            # Header fields that a proxy on this machine forwards.
            ({}, "127.0.0.1", {"Host": "llm.example"}, 403, 403),
            ({}, "127.0.0.1", {"X-Forwarded-For": "127.0.0.1"}, 403, 403),
            ({}, "127.0.0.1", {"Forwarded": "for=127.0.0.1"}, 403, 403),
            ({}, "127.0.0.1", {"Via": "1.1 proxy"}, 403, 403),
            ({"host": "0.0.0.0"}, "127.0.0.1", {}, 403, 403),
            ({"api_key": SecretStr("key")}, "127.0.0.1", {"Authorization": "Bearer key"}, 403, 403),
            ({"admin_api_key": SecretStr("admin")}, "127.0.0.1", {}, 403, 403),
            ({"open_admin": True}, "127.0.0.1", {}, 200, 200),
            ({"open_admin": True, "host": "0.0.0.0"}, "192.0.2.1", {}, 200, 200),
            ({"open_admin": True, "api_key": SecretStr("key")}, "192.0.2.1", {"Authorization": "Bearer key"}, 200, 200),
            ({"open_admin": True, "api_key": SecretStr("key")}, "127.0.0.1", {}, 401, 401),
        ],
    )
    async def test_without_an_admin_key_local_programs_operate_and_administration_needs_a_setting(
        self, settings, client, headers, operator_status, admin_status
    ):
        inner = application()
        install_error_handlers(inner)
        app = ApiKeyAuth(inner, **{"host": "127.0.0.1"} | settings)
        fields = {"headers": ({"Host": "127.0.0.1:30000"} | headers).items(), "client": client and (client, 5000)}
        answers = [await call(app, "POST", path, **fields) for path in ("/operator", "/admin")]
        assert [answer.status for answer in answers] == [operator_status, admin_status]
        if admin_status == 403:
            assert "server.admin_api_key" in answers[1].json["error"]["message"]

    @pytest.mark.parametrize(
        ("path", "settings", "client", "headers", "cause"),
        [
            ("/admin", {}, "127.0.0.1", {}, "no server.admin_api_key is set"),
            ("/admin", {"admin_api_key": SecretStr("admin")}, "127.0.0.1", {}, "it has no bearer token"),
            (
                "/operator",
                {"admin_api_key": SecretStr("admin")},
                "127.0.0.1",
                {"Authorization": "Bearer wrong"},
                "its bearer token is not server.admin_api_key",
            ),
            (
                "/operator",
                {"api_key": SecretStr("key")},
                "127.0.0.1",
                {"Authorization": "Bearer key"},
                "server.api_key is set and server.admin_api_key is not",
            ),
            ("/operator", {"host": "0.0.0.0"}, "127.0.0.1", {}, "the server listens on 0.0.0.0"),
            ("/operator", {}, "192.0.2.1", {}, "it comes from 192.0.2.1"),
            ("/operator", {}, None, {}, "it comes from an unknown address"),
            ("/operator", {}, "127.0.0.1", {"Host": "llm.example"}, "its Host is not a loopback address"),
            ("/operator", {}, "127.0.0.1", {"X-Forwarded-For": "::1"}, "its header field 'x-forwarded-for' shows"),
        ],
    )
    async def test_a_refusal_states_its_cause(self, path, settings, client, headers, cause):
        inner = application()
        install_error_handlers(inner)
        app = ApiKeyAuth(inner, **{"host": "127.0.0.1"} | settings)
        fields = {"headers": ({"Host": "127.0.0.1:30000"} | headers).items(), "client": client and (client, 5000)}
        answer = await call(app, "POST", path, **fields)
        assert answer.status == 403
        assert cause in answer.json["error"]["message"]

    @pytest.mark.parametrize(
        "field",
        [
            "CDN-Loop",
            "CF-Connecting-IP",
            "CF-Ray",
            "Client-IP",
            "Fastly-Client-IP",
            "Forwarded",
            "True-Client-IP",
            "Via",
            "X-Client-IP",
            "X-Cluster-Client-IP",
            "X-Envoy-External-Address",
            "X-Forwarded",
            "X-Forwarded-Client-Cert",
            "X-Forwarded-For",
            "X-Forwarded-Host",
            "X-Forwarded-Port",
            "X-Forwarded-Prefix",
            "X-Forwarded-Proto",
            "X-Forwarded-Server",
            "X-Forwarded-Ssl",
            "X-Original-Forwarded-For",
            "X-Real-IP",
        ],
    )
    async def test_proxy_header_fields_remove_operator_rights(self, field):
        inner = application()
        install_error_handlers(inner)
        fields = {"headers": [("Host", "127.0.0.1:30000"), (field, "")], "client": ("127.0.0.1", 5000)}
        assert (await call(ApiKeyAuth(inner, host="127.0.0.1"), "POST", "/operator", **fields)).status == 403

    @pytest.mark.parametrize(("version", "status"), [("0.9", 403), ("1.0", 403), ("1.1", 200), ("2.0", 403)])
    async def test_only_http_1_1_has_operator_rights_without_a_key(self, version, status):
        """By default, nginx sends requests of version 1.0 to its upstreams."""
        inner = application()
        install_error_handlers(inner)
        fields = {"headers": [("Host", "127.0.0.1:30000")], "client": ("127.0.0.1", 5000), "http_version": version}
        assert (await call(ApiKeyAuth(inner, host="127.0.0.1"), "POST", "/operator", **fields)).status == status

    @pytest.mark.parametrize("header", ["Basic key", "key", "Bearer", "bearer  ", "Bearer k\xe9y"])
    async def test_other_credentials_are_refused_with_the_expected_header(self, header):
        answer = await call(ApiKeyAuth(ok, api_key=SecretStr("key")), headers=[("Authorization", header)])
        assert answer.status == 401
        assert answer.headers["www-authenticate"] == "Bearer"
        assert answer.json["error"]["code"] == "invalid_api_key"

    async def test_the_scheme_is_case_insensitive(self):
        answer = await call(ApiKeyAuth(ok, api_key=SecretStr("key")), headers=[("Authorization", "bEARER key")])
        assert answer.status == 200

    async def test_a_key_may_contain_any_text(self):
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
        ("host", "origin", "status"),
        [
            ("127.0.0.1:30000", None, 200),
            ("127.0.0.1:30000", "http://127.0.0.1:30000", 200),
            ("localhost:30000", "http://localhost:30000", 200),
            ("[::1]:30000", "http://[::1]:30000", 200),
            ("127.0.0.1:30000", "http://127.0.0.1:8080", 403),
            ("127.0.0.1:30000", "https://evil.example", 403),
            ("127.0.0.1:30000", "null", 403),
            ("127.0.0.1:30000", "", 403),
            ("127.0.0.1:30000", "http://[", 403),
            ("llm.example:30000", "http://llm.example:30000", 200),
            ("llm.example", "https://llm.example", 200),
            ("llm.example:30000", "https://llm.example", 403),
            ("llm.example", "https://chat.example", 200),
            ("llm.example", "https://chat.example:444", 403),
        ],
    )
    async def test_a_page_may_post_to_its_own_site_only(self, host, origin, status):
        app = OriginGuard(ok, allowed=["https://chat.example/"])
        headers = [("Host", host)] + ([] if origin is None else [("Origin", origin)])
        assert (await call(app, "POST", "/generate", headers)).status == status

    @pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS"])
    async def test_reading_requests_of_other_origins_are_served(self, method):
        app = OriginGuard(ok)
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
    async def test_a_get_that_changes_state_is_guarded_too(self, header, status):
        app = OriginGuard(ok, guarded_paths={"/flush_cache"})
        assert (await call(app, "GET", "/flush_cache", [("Host", "localhost"), header])).status == status

    async def test_a_star_allows_every_origin(self):
        app = OriginGuard(ok, allowed=["*"])
        assert (await call(app, "POST", headers=[("Origin", "https://any.example")])).status == 200

    async def test_the_refusal_names_the_origin_and_the_setting(self):
        answer = await call(OriginGuard(ok), "POST", headers=[("Origin", "https://evil.example")])
        assert "https://evil.example" in answer.json["error"]["message"]
        assert "server.cors_origins" in answer.json["error"]["message"]


class TestHostGuard:
    @pytest.mark.parametrize(
        "host",
        [
            "127.0.0.1",
            "127.0.0.1:30000",
            "127.8.9.10",
            "localhost",
            "LocalHost:1",
            "localhost.",
            "demo.localhost:30000",
            "[::1]",
            "[::1]:30000",
            "[0:0:0:0:0:0:0:1]",
            "[::ffff:127.0.0.1]",
        ],
    )
    async def test_loopback_names_are_always_accepted(self, host):
        for allowed in (None, [], ["llm.example"]):
            app = HostGuard(ok, "127.0.0.1", allowed)
            assert (await call(app, headers=[("Host", host)])).status == 200
        assert (await call(HostGuard(ok, "0.0.0.0", ["llm.example"]), headers=[("Host", host)])).status == 200

    @pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS", "POST", "PUT", "DELETE", "TRACE"])
    @pytest.mark.parametrize(
        "host",
        [
            "evil.example",
            "evil.example:30000",
            "localhost.evil.example",
            "127.0.0.1.evil.example",
            "evillocalhost",
            "localhost..",
            "10.0.0.1",
            "0.0.0.0",
            "[::]",
            "[::2]",
            "127.1",
            "2130706433",
        ],
    )
    async def test_foreign_names_are_refused_on_a_loopback_address(self, method, host):
        answer = await call(HostGuard(ok, "127.0.0.1"), method, headers=[("Host", host)])
        assert (answer.status, answer.json["error"]["code"]) == (403, "host_not_allowed")
        assert "server.allowed_hosts" in answer.json["error"]["message"]

    @pytest.mark.parametrize(
        ("listens_on", "allowed", "host", "status"),
        [
            ("0.0.0.0", None, "evil.example", 200),
            ("0.0.0.0", ["llm.example"], "evil.example", 403),
            ("192.0.2.7", ["llm.example"], "192.0.2.7:30000", 200),
            ("192.0.2.7", [], "192.0.2.8", 403),
            ("127.0.0.1", ["llm.example"], "llm.example", 200),
            ("127.0.0.1", ["LLM.example."], "llm.EXAMPLE.:443", 200),
            ("127.0.0.1", ["llm.example"], "a.llm.example", 403),
            ("127.0.0.1", ["*.llm.example"], "a.b.llm.example", 200),
            ("127.0.0.1", ["*.llm.example"], "llm.example", 403),
            ("127.0.0.1", ["*.llm.example"], "evilllm.example", 403),
            ("127.0.0.1", ["2001:db8::1"], "[2001:DB8::1]:30000", 200),
            ("127.0.0.1", ["*"], "evil.example", 200),
        ],
    )
    async def test_the_setting_adds_further_hosts(self, listens_on, allowed, host, status):
        assert (await call(HostGuard(ok, listens_on, allowed), headers=[("Host", host)])).status == status

    @pytest.mark.parametrize(
        ("entry", "host"),
        [
            ("llm.example.org", "llm.example.org:8443"),
            ("LLM.example.org.", "llm.example.org"),
            ("llm_1.example.org", "llm_1.example.org"),
            ("xn--mnchen-3ya.example", "xn--mnchen-3ya.example"),
            ("*.example.org", "a.example.org"),
            ("2001:db8::5", "[2001:DB8::5]:443"),
            ("[2001:db8::5]", "[2001:db8:0::5]"),
            ("2001:0db8:0:0:0:0:0:5", "[2001:db8::5]"),
            ("::ffff:192.0.2.7", "192.0.2.7"),
            ("192.0.2.7", "[::ffff:c000:207]"),
        ],
    )
    async def test_an_accepted_entry_matches_in_every_spelling(self, entry, host):
        (allowed,) = ServerSettings(allowed_hosts=[entry]).allowed_hosts
        for names in ([allowed], [entry.strip("[]")]):
            assert (await call(HostGuard(ok, "127.0.0.1", names), headers=[("Host", host)])).status == 200

    @pytest.mark.parametrize(
        ("entry", "nearest"),
        [
            ("llm.example.org:8443", "llm.example.org"),
            ("llm.example.org:*", "llm.example.org"),
            ("https://llm.example.org", "llm.example.org"),
            ("https://User@LLM.example.org:8443/v1?a=b", "llm.example.org"),
            ("llm.example.org/", "llm.example.org"),
            (" llm.example.org", "llm.example.org"),
            ("[2001:db8::5]:443", "2001:db8::5"),
            ("http://[2001:DB8:0::5]/", "2001:db8::5"),
            ("192.0.2.7:80", "192.0.2.7"),
            (".example.org", "*.example.org"),
            ("*example.org", "*.example.org"),
            ("*.*.example.org", "*.example.org"),
            ("münchen.example", "xn--mnchen-3ya.example"),
            ("a.*.example.org", None),
            ("*.192.0.2.7", None),
            ("192.0.2", None),
            ("192.0.2.300", None),
            ("a..b", None),
            ("a b", None),
            ("a,b", None),
            ("[llm.example.org]", "llm.example.org"),
            ("2001:db8::5::", None),
            ("*.", None),
            (".", None),
            ("", None),
        ],
    )
    def test_an_entry_that_cannot_match_is_refused_with_the_nearest_valid_one(self, entry, nearest):
        with pytest.raises(ConfigError) as refused:
            EngineConfig.load({"server": {"allowed_hosts": [entry]}})
        message = str(refused.value)
        assert "server.allowed_hosts[0]" in message
        assert (f"such as {nearest!r}" if nearest else "must") in message
        assert ("such as" in message) == (nearest is not None)

    @pytest.mark.parametrize(
        ("listens_on", "path", "host", "status"),
        [
            ("0.0.0.0", "/health", "10.1.2.3:30000", 200),
            ("0.0.0.0", "/health", "[fd00::1]:30000", 200),
            ("0.0.0.0", "/health", "evil.example", 403),
            ("0.0.0.0", "/health", "10.1.2.3.evil.example", 403),
            ("0.0.0.0", "/generate", "10.1.2.3:30000", 403),
            ("127.0.0.1", "/health", "10.1.2.3:30000", 403),
        ],
    )
    async def test_a_probe_may_use_any_address_that_the_server_listens_on(self, listens_on, path, host, status):
        app = HostGuard(ok, listens_on, ["llm.example"], probe_paths={"/health"})
        assert (await call(app, path=path, headers=[("Host", host)])).status == status

    @pytest.mark.parametrize("listens_on", ["127.0.0.1", "0.0.0.0"])
    @pytest.mark.parametrize(
        ("hosts", "target", "version", "status"),
        [
            ([], None, "1.1", 400),
            ([], None, "1.0", 200),
            ([], "127.0.0.1", "1.0", 400),
            (["127.0.0.1", "127.0.0.1"], None, "1.1", 400),
            (["127.0.0.1", "evil.example"], None, "1.1", 400),
            ([""], None, "1.1", 400),
            ([" "], None, "1.1", 400),
            (["a@127.0.0.1"], None, "1.1", 400),
            (["127.0.0.1@evil.example"], None, "1.1", 400),
            (["127.0.0.1,evil.example"], None, "1.1", 400),
            (["127.0.0.1/x"], None, "1.1", 400),
            (["127.0.0.1:port"], None, "1.1", 400),
            (["127.0.0.1:99999"], None, "1.1", 400),
            (["127.0.0.1:"], None, "1.1", 200),
            (["[::1"], None, "1.1", 400),
            (["::1"], None, "1.1", 400),
            ([":30000"], None, "1.1", 400),
            (["."], None, "1.1", 400),
            (["caf\xe9"], None, "1.1", 400),
            (["127.0.0.1:1"], "127.0.0.1:1", "1.1", 200),
            (["LOCALHOST"], "localhost", "1.1", 200),
            (["127.0.0.1:1"], "127.0.0.1:2", "1.1", 400),
            (["127.0.0.1"], "evil.example", "1.1", 400),
            (["127.0.0.1"], "a@127.0.0.1", "1.1", 400),
            (["127.0.0.1"], "", "1.1", 400),
        ],
    )
    async def test_a_request_must_name_its_host_once_and_clearly(self, listens_on, hosts, target, version, status):
        state = {} if target is None else {TARGET_AUTHORITY: target}
        headers = [("Host", host) for host in hosts]
        answer = await call(HostGuard(ok, listens_on), headers=headers, state=state, http_version=version)
        assert answer.status == status
        if status == 400:
            assert answer.json["error"]["code"] == "invalid_host"
