import ctypes
import shutil
import stat
import sys
from pathlib import Path
from subprocess import PIPE, Popen

import pytest

from graftlm.layers.kernel_build import KernelBuildError, build_library, load_library, user_cache_dir

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")

ANSWER = 'extern "C" int answer() { return %d; }\n'


def source(directory, number=42):
    path = directory / "tiny.cpp"
    path.write_text(ANSWER % number)
    return path


def test_a_library_is_compiled_into_a_private_directory(tmp_path):
    library = build_library(source(tmp_path), "g++", tmp_path / "a" / "cache")
    assert ctypes.CDLL(str(library)).answer() == 42
    assert stat.S_IMODE(library.parent.stat().st_mode) == 0o700
    assert list(library.parent.iterdir()) == [library]  # no temporary files stay


def test_a_library_is_compiled_once_per_source(tmp_path):
    first = build_library(source(tmp_path), "g++", tmp_path / "cache")
    modified = first.stat().st_mtime_ns
    assert build_library(source(tmp_path), "g++", tmp_path / "cache") == first
    assert first.stat().st_mtime_ns == modified
    assert build_library(source(tmp_path, 43), "g++", tmp_path / "cache") != first


def test_what_a_source_includes_is_a_part_of_it(tmp_path):
    path, header, inner = tmp_path / "tiny.cpp", tmp_path / "header.h", tmp_path / "inner.h"
    path.write_text('#include "header.h"\nextern "C" int answer() { return ANSWER; }\n')
    header.write_text('#pragma once\n# include "header.h"\n#include "inner.h"\n')
    answers = []
    for number in (42, 43, 42):
        inner.write_text(f"#define ANSWER {number}\n")
        answers.append(load_library(path, "g++", tmp_path / "cache").answer())
    assert answers == [42, 43, 42]
    assert len(list((tmp_path / "cache").iterdir())) == 2


def test_other_flags_make_another_library(tmp_path):
    path = tmp_path / "tiny.cpp"
    path.write_text('extern "C" int answer() { return ANSWER; }\n')
    answers = [load_library(path, "g++", tmp_path / "cache", [f"-DANSWER={number}"]).answer() for number in (42, 43)]
    assert answers == [42, 43]


def test_processes_may_compile_at_the_same_time(tmp_path):
    program = (
        "import sys, ctypes, pathlib\n"
        "from graftlm.layers.kernel_build import build_library\n"
        "sys.stdin.readline()\n"
        "path = build_library(pathlib.Path(sys.argv[1]), 'g++', pathlib.Path(sys.argv[2]))\n"
        "print(ctypes.CDLL(str(path)).answer(), path.name)\n"
    )
    command = [sys.executable, "-c", program, str(source(tmp_path)), str(tmp_path / "cache")]
    processes = [Popen(command, stdin=PIPE, stdout=PIPE, text=True) for _ in range(3)]
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    outputs = {process.communicate(timeout=60)[0] for process in processes}
    assert len(outputs) == 1
    assert outputs.pop().startswith("42 tiny-")
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_a_missing_compiler_is_named(tmp_path):
    with pytest.raises(KernelBuildError, match=r"no C\+\+ compiler '/nowhere/g\+\+' found"):
        build_library(source(tmp_path), "/nowhere/g++", tmp_path / "cache")


def test_the_compiler_speaks_when_it_fails(tmp_path):
    path = tmp_path / "broken.cpp"
    path.write_text("int answer( { return 1; }\n")
    with pytest.raises(KernelBuildError, match=r"could not compile broken.cpp:\n.*error"):
        build_library(path, "g++", tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_directory_that_others_may_write_to_is_not_trusted(tmp_path):
    cache = tmp_path / "cache"
    cache.mkdir()
    cache.chmod(0o777)
    with pytest.raises(KernelBuildError, match="not trusted"):
        build_library(source(tmp_path), "g++", cache)


def test_a_directory_that_cannot_be_made_is_reported(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(KernelBuildError, match="kernel_cache_dir"):
        build_library(source(tmp_path), "g++", tmp_path / "file" / "cache")


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"XDG_CACHE_HOME": "/var/tmp/mine"}, Path("/var/tmp/mine/graftlm")),
        ({"XDG_CACHE_HOME": "relative"}, Path.home() / ".cache" / "graftlm"),
        ({}, Path.home() / ".cache" / "graftlm"),
    ],
)
def test_the_cache_follows_the_xdg_specification(environ, expected):
    assert user_cache_dir(environ) == expected
