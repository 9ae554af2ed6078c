"""How `graftlm serve` starts, and what it says when it cannot."""

import re
import socket
import subprocess
import sys
import textwrap

import pytest
import requests

from graftlm.testing.server_process import ServerProcess

SERVE = [sys.executable, "-c", "from graftlm.cli import main; main()", "serve"]


def run_serve(*arguments, **options):
    return subprocess.run([*SERVE, *arguments], capture_output=True, text=True, timeout=60, **options)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.mark.parametrize(
    ("yaml", "says"),
    [
        ("cache: {name: radix, page_sizes: 16}", "engine.yaml:1: cache.page_sizes: unknown key"),
        ("cache: radixx", "Unknown prefix cache 'radixx'"),
        ("model: /nowhere/at/all", "/nowhere/at/all"),
        ("model: {context_len: 999999999}", "model.context_len"),
        ("model: [", "engine.yaml"),
        ("server: {port: 99999}", "server.port"),
        ("attention: nonsense", "Unknown attention backend 'nonsense'"),
        ("cache: {page_size: 3}", "cache.page_size"),
        ("server: {host: 203.0.113.77}", "cannot listen on 203.0.113.77"),
    ],
)
def test_a_bad_configuration_ends_with_2_and_one_message_before_anything_listens(tmp_path, yaml, says):
    file = tmp_path / "engine.yaml"
    file.write_text(textwrap.dedent(yaml))
    port = [] if "server" in yaml else ["--port", str(free_port())]
    done = run_serve(str(file), *port)
    assert done.returncode == 2, done.stderr
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert says in errors[0]
    assert "Traceback" not in done.stderr
    assert "serving on" not in done.stdout


def test_a_missing_file_is_one_message():
    done = run_serve("nowhere.yaml")
    assert done.returncode == 2
    assert "nowhere.yaml" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_port_that_is_taken_is_found_before_the_model_is_loaded():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        done = run_serve("--port", str(taken.getsockname()[1]))
    assert done.returncode == 2
    assert "error: cannot listen on 127.0.0.1" in done.stderr
    assert "loading weights" not in done.stderr


def test_progress_and_duration_are_told(server):
    assert re.search(r"scheduler-0: loading plugins", server.log)
    assert re.search(r"scheduler-0: loading weights", server.log)
    assert re.search(r"scheduler-0: allocating KV memory", server.log)
    assert re.search(r"KV memory of each: 32,768 tokens", server.log)
    assert re.search(r"ready after \d+\.\d s on http://127\.0\.0\.1:\d+", server.log)


def test_it_listens_on_the_loopback_only(server):
    assert server.url.startswith("http://127.0.0.1:")


def test_secrets_are_in_no_log_and_no_answer():
    with ServerProcess({"model": "demo", "server": {"api_key": "s3cret-key", "log_level": "debug"}}) as server:
        headers = {"Authorization": "Bearer s3cret-key"}
        info = requests.get(server.url + "/server_info", headers=headers, timeout=10)
        assert info.status_code == 200
        assert "s3cret-key" not in info.text
        assert requests.get(server.url + "/server_info", timeout=10).status_code == 401
        assert "s3cret-key" not in server.log


def test_a_plugin_that_breaks_while_loading_is_named(tmp_path):
    (tmp_path / "broken_plugin.py").write_text("raise RuntimeError('no luck')\n")
    file = tmp_path / "engine.yaml"
    file.write_text("plugins: {modules: [broken_plugin]}\ncache: {eviction: luck}\n")
    done = run_serve(str(file), cwd=tmp_path)
    assert done.returncode == 2
    assert "luck" in done.stderr
    assert "Traceback" not in done.stderr
