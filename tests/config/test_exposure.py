"""A configuration that exposes the server to other machines is detected before the server listens."""

import pytest

from graftlm.cli import main
from graftlm.config import EngineConfig, canonical_host, exposure_errors, exposure_warnings, is_loopback


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("::ffff:127.0.0.1", True),
        ("localhost", True),
        ("LOCALHOST", True),
        ("a.localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("", False),
        ("192.0.2.1", False),
        ("::ffff:192.0.2.1", False),
        ("llm.example", False),
        ("localhost.example", False),
    ],
)
def test_loopback_addresses_are_recognised(host, expected):
    assert is_loopback(host) is expected


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("LLM.Example.Org.", "llm.example.org"),
        ("2001:DB8:0:0::5", "2001:db8::5"),
        ("::ffff:192.0.2.1", "192.0.2.1"),
        ("fe80::1%eth0", "fe80::1"),
        ("127.1", "127.1"),
        ("localhost..", "localhost."),
    ],
)
def test_all_spellings_of_a_host_have_one_canonical_form(host, expected):
    assert canonical_host(host) == expected


@pytest.mark.parametrize(
    ("server", "is_error", "num_warnings"),
    [
        ({}, False, 0),
        ({"host": "localhost"}, False, 0),
        ({"host": "0.0.0.0"}, True, 0),
        ({"host": "::"}, True, 0),
        ({"host": "llm.example"}, True, 0),
        ({"host": "0.0.0.0", "admin_api_key": "a"}, True, 0),
        ({"host": "0.0.0.0", "api_key": "a"}, False, 0),
        ({"host": "0.0.0.0", "allow_anonymous": True}, False, 1),
        ({"kv_events": "tcp://127.0.0.1:5557"}, False, 0),
        ({"kv_events": "tcp://[::1]:5557"}, False, 0),
        ({"kv_events": "ipc://events.sock"}, False, 0),
        ({"kv_events": "tcp://0.0.0.0:5557"}, False, 1),
        ({"kv_events": "tcp://*:5557"}, False, 1),
        ({"kv_events": "tcp://[::]:5557"}, False, 1),
        ({"kv_events": "tcp://eth0:5557"}, False, 1),
        (
            {"kv_events": {"endpoint": "tcp://*:1", "format": "vllm", "replay_endpoint": "tcp://*:2"}},
            False,
            2,
        ),
    ],
)
def test_a_public_address_needs_a_key_or_an_explicit_permission(server, is_error, num_warnings):
    config = EngineConfig(server=server)
    assert bool(exposure_errors(config)) is is_error
    assert len(exposure_warnings(config)) == num_warnings


@pytest.mark.parametrize(
    ("yaml", "status", "says"),
    [
        ("server: {host: 0.0.0.0}", 2, "engine.yaml:1: server.host: '0.0.0.0' is reachable from other machines"),
        ("server: {host: 0.0.0.0, allow_anonymous: true}", 0, "served without a key"),
        (
            "server: {kv_events: 'tcp://0.0.0.0:1'}",
            0,
            "engine.yaml:1: server.kv_events.endpoint: tcp://0.0.0.0:1 is reachable",
        ),
    ],
)
def test_config_check_reports_an_exposed_server(tmp_path, capsys, yaml, status, says):
    file = tmp_path / "engine.yaml"
    file.write_text(yaml)
    with pytest.raises(SystemExit) as ended:
        main(["config", "check", str(file)])
    assert (ended.value.code, says in capsys.readouterr().err) == (status, True)
