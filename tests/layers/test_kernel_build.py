import ctypes
import fcntl
import shutil
import stat
import sys
import threading
from pathlib import Path
from subprocess import PIPE, Popen

import pytest

from graftlm.kernel_events import KernelWatch, watching
from graftlm.layers.kernel_build import KernelBuildError, build_library, load_library, user_cache_dir
from graftlm.testing.server_process import wait_until

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


def a_venv(directory, answer):
    """Write a source and the header that kernels share as an installation has them; return both folders."""
    package, include = directory / "package", directory / "include"
    package.mkdir(parents=True)
    (include / "graftlm").mkdir(parents=True)
    (include / "graftlm" / "shared.h").write_text(f"#define ANSWER {answer}\n")
    (include / "graftlm" / "unused.h").write_text(f"// {directory}\n")
    path = package / "tiny.cpp"
    path.write_text('#include "graftlm/shared.h"\nextern "C" int answer() { return ANSWER; }\n')
    return path, include


def test_another_folder_of_equal_files_finds_the_compiled_kernel(tmp_path):
    watch = KernelWatch()
    with watching(watch):
        for name, answer in (("venv-a", 42), ("venv-b", 42), ("venv-c", 43)):
            path, include = a_venv(tmp_path / name, answer)
            assert load_library(path, "g++", tmp_path / "cache", include_dir=include).answer() == answer
    assert [use.compiled for use in watch.uses] == [True, False, True]


def test_another_path_to_the_same_compiler_finds_the_compiled_kernel(tmp_path):
    wrapper = tmp_path / "bin" / "g++"
    wrapper.parent.mkdir()
    wrapper.symlink_to(shutil.which("g++"))
    first = build_library(source(tmp_path), "g++", tmp_path / "cache")
    assert build_library(source(tmp_path), str(wrapper), tmp_path / "cache") == first


def test_a_compile_is_announced_and_a_find_is_not(tmp_path):
    lines = []
    for _ in range(2):
        with watching(KernelWatch(lines.append)) as watch:
            build_library(source(tmp_path), "g++", tmp_path / "cache")
        lines.append(watch.report())
    assert lines[0] == "compiling the kernel tiny for this CPU, once (some seconds)"
    assert lines[1].startswith("compiled the kernel tiny in ")
    assert lines[2].startswith("compiled 1 kernel in ")
    assert lines[2].endswith(f" s, kept in {tmp_path / 'cache'}")
    assert lines[3:] == [None]


def test_what_cannot_be_compiled_is_one_line(tmp_path):
    with watching(KernelWatch()) as watch:
        for name in ("one", "two"):
            path = tmp_path / f"{name}.cpp"
            path.write_text(ANSWER % 1)
            with pytest.raises(KernelBuildError):
                build_library(path, "/nowhere/g++", tmp_path / "cache")
    complaint = watch.complaint()
    assert complaint.startswith("no compiled kernels for one, two: PyTorch's operations run instead")
    assert "no C++ compiler '/nowhere/g++' found. Install g++" in complaint
    assert "\n" not in complaint


def test_whoever_needs_a_kernel_that_another_one_compiles_waits_for_it(tmp_path):
    library = build_library(source(tmp_path), "g++", tmp_path / "cache")
    whole = library.read_bytes()
    library.unlink()
    lines, found = [], []

    def need():
        with watching(KernelWatch(lines.append)) as watch:
            build_library(source(tmp_path), "g++", tmp_path / "cache")
        found.extend(watch.uses)

    with library.with_suffix(".lock").open("w") as held:  # as another process would that compiles
        fcntl.flock(held, fcntl.LOCK_EX)
        thread = threading.Thread(target=need)
        thread.start()
        wait_until(lambda: lines, what="the line of the one that waits")
        (tmp_path / "unfinished").write_bytes(whole)
        (tmp_path / "unfinished").rename(library)
        thread.join(30)
    assert lines == ["waiting for another process, which compiles tiny"]
    assert [use.compiled for use in found] == [False]


def test_a_builder_that_died_leaves_the_compile_to_the_next(tmp_path):
    expected = build_library(source(tmp_path), "g++", tmp_path / "cache")
    expected.unlink()
    expected.with_suffix(".lock").touch()  # what a killed process leaves
    assert build_library(source(tmp_path), "g++", tmp_path / "cache") == expected
    assert list(expected.parent.iterdir()) == [expected]


def test_processes_that_need_a_kernel_at_the_same_time_compile_it_once(tmp_path):
    program = (
        "import sys, ctypes, pathlib\n"
        "from graftlm.kernel_events import KernelWatch, watching\n"
        "from graftlm.layers.kernel_build import build_library\n"
        "sys.stdin.readline()\n"
        "with watching(KernelWatch()) as watch:\n"
        "    path = build_library(pathlib.Path(sys.argv[1]), 'g++', pathlib.Path(sys.argv[2]))\n"
        "print(ctypes.CDLL(str(path)).answer(), path.name, len(watch.compiled))\n"
    )
    command = [sys.executable, "-c", program, str(source(tmp_path)), str(tmp_path / "cache")]
    processes = [Popen(command, stdin=PIPE, stdout=PIPE, text=True) for _ in range(3)]
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    outputs = [process.communicate(timeout=60)[0].split() for process in processes]
    assert {answer for answer, *_ in outputs} == {"42"}
    assert len({name for _, name, _ in outputs}) == 1
    assert sorted(compiled for *_, compiled in outputs) == ["0", "0", "1"]
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
