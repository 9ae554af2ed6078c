import ctypes
import fcntl
import os
import shutil
import stat
import sys
import threading
from pathlib import Path
from subprocess import PIPE, Popen

import pytest

from graftlm.layers.kernel_build import KernelBuildError, build_library, load_library, user_cache_dir
from graftlm.runtime.kernel_events import KernelWatch, watching
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
    assert list(library.parent.iterdir()) == [library]  # no temporary files are left


def test_a_library_is_compiled_once_per_source(tmp_path):
    first = build_library(source(tmp_path), "g++", tmp_path / "cache")
    modified = first.stat().st_mtime_ns
    assert build_library(source(tmp_path), "g++", tmp_path / "cache") == first
    assert first.stat().st_mtime_ns == modified
    assert build_library(source(tmp_path, 43), "g++", tmp_path / "cache") != first


def test_a_change_of_an_included_file_causes_a_new_compilation(tmp_path):
    path, header, inner = tmp_path / "tiny.cpp", tmp_path / "header.h", tmp_path / "inner.h"
    path.write_text('#include "header.h"\nextern "C" int answer() { return ANSWER; }\n')
    header.write_text('#pragma once\n# include "header.h"\n#include "inner.h"\n')
    answers = []
    for number in (42, 43, 42):
        inner.write_text(f"#define ANSWER {number}\n")
        answers.append(load_library(path, "g++", tmp_path / "cache").answer())
    assert answers == [42, 43, 42]
    assert len(list((tmp_path / "cache").iterdir())) == 2


def test_other_flags_give_another_library(tmp_path):
    path = tmp_path / "tiny.cpp"
    path.write_text('extern "C" int answer() { return ANSWER; }\n')
    answers = [load_library(path, "g++", tmp_path / "cache", [f"-DANSWER={number}"]).answer() for number in (42, 43)]
    assert answers == [42, 43]


def a_venv(directory, answer):
    """Write a source and the kernels' shared header as in an installation; return both folders."""
    package, include = directory / "package", directory / "include"
    package.mkdir(parents=True)
    (include / "graftlm").mkdir(parents=True)
    (include / "graftlm" / "shared.h").write_text(f"#define ANSWER {answer}\n")
    (include / "graftlm" / "unused.h").write_text(f"// {directory}\n")
    path = package / "tiny.cpp"
    path.write_text('#include "graftlm/shared.h"\nextern "C" int answer() { return ANSWER; }\n')
    return path, include


def test_equal_files_in_another_folder_use_the_compiled_kernel(tmp_path):
    watch = KernelWatch()
    with watching(watch):
        for name, answer in (("venv-a", 42), ("venv-b", 42), ("venv-c", 43)):
            path, include = a_venv(tmp_path / name, answer)
            assert load_library(path, "g++", tmp_path / "cache", include_dir=include).answer() == answer
    assert [use.compiled for use in watch.uses] == [True, False, True]


def test_another_path_to_the_same_compiler_uses_the_compiled_kernel(tmp_path):
    wrapper = tmp_path / "bin" / "g++"
    wrapper.parent.mkdir()
    wrapper.symlink_to(shutil.which("g++"))
    first = build_library(source(tmp_path), "g++", tmp_path / "cache")
    assert build_library(source(tmp_path), str(wrapper), tmp_path / "cache") == first


def test_only_a_compilation_is_reported(tmp_path):
    lines = []
    for _ in range(2):
        with watching(KernelWatch(lines.append)) as watch:
            build_library(source(tmp_path), "g++", tmp_path / "cache")
        lines.append(watch.report())
    assert lines[0] == "compiling the kernel tiny for this CPU, once (some seconds)"
    assert lines[1].startswith("compiled the kernel tiny in ")
    assert lines[2].startswith("compiled 1 kernel in ")
    assert lines[2].endswith(f" s, stored in {tmp_path / 'cache'}")
    assert lines[3:] == [None]


def test_the_message_about_failed_compilations_is_one_line(tmp_path):
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


def test_a_kernel_that_another_process_compiles_is_awaited(tmp_path):
    library = build_library(source(tmp_path), "g++", tmp_path / "cache")
    whole = library.read_bytes()
    library.unlink()
    lines, found = [], []

    def need():
        with watching(KernelWatch(lines.append)) as watch:
            build_library(source(tmp_path), "g++", tmp_path / "cache")
        found.extend(watch.uses)

    with library.with_suffix(".lock").open("w") as held:  # like another process that is compiling
        fcntl.flock(held, fcntl.LOCK_EX)
        thread = threading.Thread(target=need)
        thread.start()
        wait_until(lambda: lines, what="the line of the one that waits")
        (tmp_path / "unfinished").write_bytes(whole)
        (tmp_path / "unfinished").rename(library)
        thread.join(30)
    assert lines == ["waiting for another process, which compiles tiny"]
    assert [use.compiled for use in found] == [False]


def test_after_a_compiling_process_died_the_next_one_compiles(tmp_path):
    expected = build_library(source(tmp_path), "g++", tmp_path / "cache")
    expected.unlink()
    expected.with_suffix(".lock").touch()  # the lock that a killed process leaves
    assert build_library(source(tmp_path), "g++", tmp_path / "cache") == expected
    assert list(expected.parent.iterdir()) == [expected]


@pytest.mark.few(num_processes=1)
@pytest.mark.parametrize("num_processes", [2, 3])
def test_processes_that_need_a_kernel_at_the_same_time_compile_it_once(tmp_path, num_processes):
    program = (
        "import sys, ctypes, pathlib\n"
        "from graftlm.runtime.kernel_events import KernelWatch, watching\n"
        "from graftlm.layers.kernel_build import build_library\n"
        "sys.stdin.readline()\n"
        "with watching(KernelWatch()) as watch:\n"
        "    path = build_library(pathlib.Path(sys.argv[1]), 'g++', pathlib.Path(sys.argv[2]))\n"
        "print(ctypes.CDLL(str(path)).answer(), path.name, len(watch.compiled))\n"
    )
    command = [sys.executable, "-c", program, str(source(tmp_path)), str(tmp_path / "cache")]
    processes = [Popen(command, stdin=PIPE, stdout=PIPE, text=True) for _ in range(num_processes)]
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    outputs = [process.communicate(timeout=60)[0].split() for process in processes]
    assert {answer for answer, *_ in outputs} == {"42"}
    assert len({name for _, name, _ in outputs}) == 1
    assert sorted(compiled for *_, compiled in outputs) == ["0"] * (num_processes - 1) + ["1"]
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_a_missing_compiler_is_reported(tmp_path):
    with pytest.raises(KernelBuildError, match=r"no C\+\+ compiler '/nowhere/g\+\+' found"):
        build_library(source(tmp_path), "/nowhere/g++", tmp_path / "cache")


def test_the_error_has_the_output_of_the_compiler(tmp_path):
    path = tmp_path / "broken.cpp"
    path.write_text("int answer( { return 1; }\n")
    with pytest.raises(KernelBuildError, match=r"could not compile broken.cpp:\n.*error"):
        build_library(path, "g++", tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o757])
def test_a_folder_that_others_can_write_is_refused(tmp_path, mode):
    cache = tmp_path / "cache"
    cache.mkdir()
    cache.chmod(mode)
    with pytest.raises(
        KernelBuildError, match=f"not trusted: its mode {stat.filemode(mode | stat.S_IFDIR)} lets other"
    ):
        build_library(source(tmp_path), "g++", cache)


@pytest.mark.parametrize("num_bytes", [0, 64, 7000, -1])
def test_a_damaged_library_is_compiled_again(tmp_path, caplog, num_bytes):
    path, cache = source(tmp_path), tmp_path / "cache"
    library = build_library(path, "g++", cache)
    content = library.read_bytes()
    library.write_bytes(content[:num_bytes])  # a loader that maps a truncated library would crash the process
    with watching(KernelWatch()) as watch:
        assert build_library(path, "g++", cache) == library
    assert library.read_bytes() == content
    assert [use.compiled for use in watch.uses] == [True]
    shown = f"{len(content[:num_bytes]):,}"
    assert (
        f"the compiled kernel {library} is damaged, or was written by an older graftlm: its {shown} bytes do not"
        in caplog.text
    )


def test_a_library_with_changed_bytes_is_compiled_again(tmp_path):
    path, cache = source(tmp_path), tmp_path / "cache"
    library = build_library(path, "g++", cache)
    content = library.read_bytes()
    middle = len(content) // 2
    library.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
    build_library(path, "g++", cache)
    assert library.read_bytes() == content


def replaced_by_a_link(library):
    library.rename(library.with_name("elsewhere"))
    library.symlink_to("elsewhere")


@pytest.mark.parametrize("change", [lambda library: library.chmod(0o775), replaced_by_a_link], ids=["mode", "link"])
def test_a_library_that_others_can_write_is_compiled_again(tmp_path, change):
    path, cache = source(tmp_path), tmp_path / "cache"
    library = build_library(path, "g++", cache)
    change(library)
    with watching(KernelWatch()) as watch:
        build_library(path, "g++", cache)
    assert len(watch.compiled) == 1
    assert stat.S_IMODE(library.lstat().st_mode) == 0o755
    assert stat.S_ISREG(library.lstat().st_mode)


@pytest.mark.parametrize("umask", [0o000, 0o077])
def test_the_mode_of_a_library_does_not_depend_on_the_umask(tmp_path, umask):
    umask = os.umask(umask)
    try:
        with watching(KernelWatch()) as watch:
            for _ in range(2):
                build_library(source(tmp_path), "g++", tmp_path / "cache")
    finally:
        os.umask(umask)
    assert [use.compiled for use in watch.uses] == [True, False]
    assert stat.S_IMODE(watch.uses[0].library.stat().st_mode) == 0o755


def test_folders_of_killed_builders_are_removed(tmp_path):
    cache = tmp_path / "cache"
    for name in ("build-dead", "build-running"):
        (cache / name).mkdir(parents=True)
        (cache / name / "tiny.so").write_bytes(b"")
    cache.chmod(0o700)
    os.utime(cache / "build-dead", (0, 0))
    library = build_library(source(tmp_path), "g++", cache)
    assert sorted(cache.iterdir()) == [cache / "build-running", library]


COMPILERS = {
    "of another format": b"\x7fELF nothing that runs",
    "no interpreter": b"#!/nowhere/interpreter\n",
    "a version in no encoding": b"#!/bin/sh\nprintf '\\377\\376\\n'\nexit 1\n",
}


@pytest.mark.parametrize("name", COMPILERS)
def test_a_compiler_that_cannot_run_is_a_build_error(tmp_path, name):
    compiler = tmp_path / "compiler"
    compiler.write_bytes(COMPILERS[name])
    compiler.chmod(0o755)
    with watching(KernelWatch()) as watch, pytest.raises(KernelBuildError, match=f"{compiler}"):
        build_library(source(tmp_path), str(compiler), tmp_path / "cache")
    assert list(watch.refused) == ["tiny"]


def test_a_compiler_may_write_in_any_encoding(tmp_path):
    compiler = tmp_path / "compiler"
    compiler.write_bytes(b"#!/bin/sh\nprintf '\\377\\n'\nprintf '\\376\\n' >&2\nexec g++ \"$@\"\n")
    compiler.chmod(0o755)
    assert load_library(source(tmp_path), str(compiler), tmp_path / "cache").answer() == 42


def test_a_folder_that_cannot_be_created_is_reported(tmp_path):
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
