"""`graftlm warmup`, and the messages of commands that compile kernels when they start."""

import os
import re
import shutil
import stat

import pytest

from check_wheel import kernel_rows
from graftlm.cli import main
from graftlm.layers.kernel_build import user_cache_dir
from graftlm.testing.server_process import ServerProcess

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")

KERNELS = ("layer_ops", "panel_matmul", "tile_matmul", "paged_attention", "token_masks", "sampling")

#: Stands in for g++ and returns libraries that were compiled before; a library's file name has the hash of everything
#: on which it depends.
COMPILER = """#!/bin/sh
for last; do :; done
kept="{kept}/$(basename "$last")"
if [ -f "$kept" ]; then cp "$kept" "$last"; else exec {compiler} "$@"; fi
"""


@pytest.fixture
def run(capsys, tmp_path, monkeypatch):
    """Run a command with an empty kernel cache and a fast compiler; return (exit status, stdout, stderr)."""
    compiler = tmp_path / "bin" / "g++"
    compiler.parent.mkdir()
    compiler.write_text(COMPILER.format(kept=user_cache_dir(os.environ), compiler=shutil.which("g++")))
    compiler.chmod(stat.S_IRWXU)
    monkeypatch.setenv("PATH", f"{compiler.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def command(*arguments):
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        captured = capsys.readouterr()
        return ended.value.code or 0, captured.out, captured.err

    return command


def used(out):
    """Return name -> whether it was compiled in this run, from a table of kernels."""
    return {name: origin == "compiled" for name, (_, origin) in kernel_rows(out).items()}


def test_warmup_compiles_the_kernels_of_the_next_start(run, tmp_path, request):
    status, out, err = run("warmup", "--model", "demo", "--set", "memory.kv_tokens=1024")
    assert status == 0
    kernels = used(out)
    assert {"layer_ops", "paged_attention", "token_masks", "sampling"} <= kernels.keys() <= set(KERNELS)
    assert all(kernels.values())
    assert re.search(rf"compiled {len(kernels)} kernels in [\d.]+ s, stored in {tmp_path / 'cache' / 'graftlm'}", out)
    for name in kernels:
        assert f"compiling the kernel {name} " in err

    status, out, err = run("warmup", "--model", "demo", "--set", "memory.kv_tokens=1024")
    assert (status, err) == (0, "")
    assert used(out) == dict.fromkeys(kernels, False)
    assert "compiled nothing" in out

    status, _, err = run("generate", "a", "--max-tokens", "1", "--set", "memory.kv_tokens=1024")
    assert (status, err) == (0, "")
    if not request.config.getoption("--full"):  # a server finds them as `generate` does
        return
    with ServerProcess({"model": "demo", "memory": {"kv_tokens": 1024}}) as server:
        assert "compil" not in server.log
        assert "native from the cache" in server.log


def test_a_first_generate_reports_the_kernels_that_it_compiles(run, tmp_path):
    status, _, err = run("generate", "a", "--max-tokens", "1", "--set", "memory.kv_tokens=1024")
    assert status == 0
    assert "compiling the kernel paged_attention for this CPU, once" in err
    assert err.splitlines()[-1].startswith("compiled ")
    assert err.splitlines()[-1].endswith(f" s, stored in {tmp_path / 'cache' / 'graftlm'}")


def test_without_a_compiler_one_line_reports_the_consequence(run, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    status, _, err = run("generate", "a", "--max-tokens", "1", "--set", "memory.kv_tokens=1024")
    assert status == 0
    assert err.count("\n") == 1
    assert re.match(r"warning: no compiled kernels for .*paged_attention.*: PyTorch's operations run instead", err)
    assert "no C++ compiler 'g++' found" in err


def test_warmup_of_a_wrong_configuration_exits_with_2(run):
    status, out, err = run("warmup", "--model", "/no/such/model")
    assert (status, out) == (2, "")
    assert err.startswith("error: No checkpoint at '/no/such/model'")
