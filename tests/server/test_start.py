"""The start of `graftlm serve`, and its error messages."""

import logging
import re
import socket
import subprocess
import sys

import pytest

from graftlm.cli import main

SERVE = [sys.executable, "-c", "from graftlm.cli import main; main()", "serve"]


def run_serve(*arguments, **options):
    return subprocess.run([*SERVE, *arguments], capture_output=True, text=True, timeout=60, **options)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def serve(capsys):
    """Return a function that runs `graftlm serve` in this process until it ends and returns (status, stdout,
    stderr).
    """
    root = logging.getLogger()
    level, handlers = root.level, root.handlers[:]

    def run(*arguments):
        with pytest.raises(SystemExit) as ended:
            main(["serve", *map(str, arguments)])
        return ended.value.code, *capsys.readouterr()

    yield run
    root.setLevel(level)
    root.handlers[:] = handlers


@pytest.mark.parametrize(
    ("yaml", "says"),
    [
        ("cache: {name: radix, page_sizes: 16}", "engine.yaml:1: cache.page_sizes: unknown key"),
        ("cache: radixx", "Unknown prefix cache 'radixx'"),
        ("model: /nowhere/at/all", "engine.yaml:1: model.path: No checkpoint at '/nowhere/at/all'"),
        (
            "model: {context_len: 999999999}",
            "engine.yaml:1: model.context_len: is 999,999,999, but the context of demo",
        ),
        (
            "lora: {adapters: {a: /no/adapter}}",
            "engine.yaml:1: lora.adapters.a: /no/adapter/adapter_config.json cannot",
        ),
        ("model: [", "engine.yaml"),
        ("server: {port: 99999}", "server.port"),
        ("attention: nonsense", "Unknown attention backend 'nonsense'"),
        ("cache: {page_size: 3}", "cache.page_size"),
        ("server: {host: 203.0.113.77, allow_anonymous: true}", "cannot listen on 203.0.113.77"),
        ("server: {host: 0.0.0.0}", "engine.yaml:1: server.host: '0.0.0.0' is reachable from other machines"),
        ("server: {open_admin: true, admin_api_key: a}", "remove one of them"),
        (None, "engine.yaml"),
    ],
)
def test_an_invalid_configuration_ends_with_2_and_one_message_before_anything_listens(serve, tmp_path, yaml, says):
    file = tmp_path / "engine.yaml"
    if yaml is not None:
        file.write_text(yaml)
    port = [] if yaml is not None and "server" in yaml else ["--port", free_port()]
    status, out, err = serve(file, *port)
    assert status == 2, err
    errors = [line for line in err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert says in errors[0]
    assert "Traceback" not in err
    assert "serving on" not in out


def test_an_error_of_the_scheduler_ends_with_2_and_one_message(tmp_path):
    file = tmp_path / "engine.yaml"
    file.write_text("memory: {kv_tokens: 900000000000}")
    done = run_serve(str(file), "--port", "0")
    assert done.returncode == 2, done.stderr
    (error,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert "memory.kv_tokens: 900,000,000,000 tokens need" in error
    assert "Traceback" not in done.stderr
    assert "serving on" not in done.stdout


def test_a_port_in_use_is_found_before_the_model_is_loaded(serve):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        status, _, err = serve("--port", taken.getsockname()[1])
    assert status == 2
    assert "error: cannot listen on 127.0.0.1" in err
    assert "loading" not in err


def test_progress_and_duration_are_logged(server):
    assert re.search(r"scheduler-0: loading plugins", server.log)
    assert re.search(r"scheduler-0: loading weights", server.log)
    assert re.search(r"scheduler-0: allocating KV memory", server.log)
    assert re.search(r"KV memory of each: 32,768 tokens", server.log)
    assert re.search(r"ready after \d+\.\d s on http://127\.0\.0\.1:\d+", server.log)


def test_the_default_address_is_the_loopback(server):
    assert server.url.startswith("http://127.0.0.1:")


def test_a_plugin_that_fails_to_load_is_named(tmp_path):
    (tmp_path / "broken_plugin.py").write_text("raise RuntimeError('no luck')\n")
    file = tmp_path / "engine.yaml"
    file.write_text("plugins: {modules: [broken_plugin]}\ncache: {eviction: luck}\n")
    done = run_serve(str(file), cwd=tmp_path)
    assert done.returncode == 2
    assert "luck" in done.stderr
    assert "Traceback" not in done.stderr
