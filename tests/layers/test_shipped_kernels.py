"""The kernels of a wheel, from the build hook to the loader, in a small project."""

import os
import platform
import shutil
import sys
import zipfile
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder

from graftlm.layers.kernel_build import load_library
from graftlm.layers.kernel_choice import choosing_kernels
from graftlm.layers.kernel_levels import LEVELS, cpu_features, levels_of
from graftlm.layers.sealed_file import seal
from graftlm.runtime.kernel_events import KernelWatch, watching

pytestmark = [
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++"),
    pytest.mark.skipif(not levels_of(*cpu_features()), reason="this CPU has no level that is compiled ahead"),
]

ROOT = Path(__file__).parents[2]
LAYERS = Path("core/graftlm/layers")
PROJECT = """
[project]
name = "tiny"
version = "1.0"
[tool.hatch.build.targets.wheel]
packages = ["plugins/tiny"]
[tool.hatch.build.targets.wheel.hooks.custom]
path = "hatch_build.py"
"""
SOURCE = """// Compiler flags: -DANSWER=42
#include "graftlm/one.h"
extern "C" int answer() { return ANSWER; }
extern "C" int level() {
#if defined(__AMX_TILE__)
    return 3;
#elif defined(__AVX512BF16__)
    return 2;
#else
    return ONE;
#endif
}
"""
NUMBERS = {"amx": 3, "avx512-bf16": 2, "x86-64-v3": 1, "armv8.2-a": 1}


@pytest.fixture
def project(tmp_path):
    root = tmp_path / "project"
    for folder in (root / LAYERS / "include" / "graftlm", root / "plugins" / "tiny"):
        folder.mkdir(parents=True)
    for name in ("kernel_levels.py", "kernel_key.py", "sealed_file.py"):
        shutil.copy(ROOT / LAYERS / name, root / LAYERS)
    shutil.copy(ROOT / "hatch_build.py", root)
    (root / "pyproject.toml").write_text(PROJECT)
    (root / LAYERS / "include" / "graftlm" / "one.h").write_text("#define ONE 1\n")
    (root / "plugins" / "tiny" / "__init__.py").write_text("")
    (root / "plugins" / "tiny" / "tiny.cpp").write_text(SOURCE)
    return root


def build(root):
    return Path(next(WheelBuilder(str(root)).build(directory=str(root / "dist"), versions=["standard"])))


@pytest.fixture
def installed(project):
    """Return the source in an installed wheel, and a function that loads its library."""
    folder = project / "site"
    with zipfile.ZipFile(build(project)) as archive:
        archive.extractall(folder)
    source = folder / "tiny" / "tiny.cpp"

    def load(compiler="/nowhere/g++"):
        with watching(KernelWatch()) as watch:
            library = load_library(source, compiler, project / "cache", include_dir=project / LAYERS / "include")
        (use,) = watch.uses
        return library, use

    return source, load


def test_a_wheel_contains_a_kernel_for_each_level_of_this_architecture(project):
    wheel = build(project)
    assert wheel.name == f"tiny-1.0-py3-none-linux_{platform.machine()}.whl"
    with zipfile.ZipFile(wheel) as archive:
        libraries = [Path(name) for name in archive.namelist() if name.endswith(".so")]
        assert "Root-Is-Purelib: false" in archive.read("tiny-1.0.dist-info/WHEEL").decode()
    assert {library.parent.name for library in libraries} == {
        level.name for level in LEVELS if level.machine == platform.machine()
    }
    assert {library.parent.parent for library in libraries} == {Path("tiny/compiled")}


def test_the_kernel_of_the_best_level_is_loaded_without_a_compiler(installed):
    _, load = installed
    library, use = load()
    best = levels_of(*cpu_features())[0].name
    assert (library.answer(), library.level()) == (42, NUMBERS[best])
    assert (use.origin, use.level, use.name) == ("wheel", best, "tiny")


@pytest.mark.parametrize("level", levels_of(*cpu_features()), ids=lambda level: level.name)
def test_a_configured_level_is_loaded(installed, level):
    _, load = installed
    with choosing_kernels(level.name):
        library, use = load()
    assert (library.level(), use.origin, use.level) == (NUMBERS[level.name], "wheel", level.name)


def test_native_kernels_are_compiled_although_the_wheel_contains_some(installed):
    _, load = installed
    with choosing_kernels("native"):
        library, use = load("g++")
    assert (library.answer(), use.origin, use.level) == (42, "compiled", "native")


def changed_source(source):
    source.write_text(SOURCE.replace("ANSWER=42", "ANSWER=43"))


def changed_header(source):
    header = source.parents[2] / LAYERS / "include" / "graftlm" / "one.h"
    header.write_text("#define ONE 1  // changed\n")


def damaged_libraries(source):
    for library in source.parent.glob("compiled/*/*.so"):
        library.write_bytes(library.read_bytes()[:-100])


def libraries_of_another_machine(source):
    for library in source.parent.glob("compiled/*/*.so"):
        library.write_bytes(b"\x7fELF of another machine")
        seal(library)


@pytest.mark.parametrize(
    ("change", "answer"),
    [
        (changed_source, 43),
        (changed_header, 42),
        (damaged_libraries, 42),
        (libraries_of_another_machine, 42),
    ],
)
def test_an_unusable_shipped_kernel_is_compiled_instead(installed, change, answer):
    source, load = installed
    change(source)
    library, use = load("g++")
    assert (library.answer(), use.origin, use.level) == (answer, "compiled", "native")


def test_without_a_compiler_a_pure_wheel_is_built_with_a_message(project, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(project))
    monkeypatch.delenv("CXX", raising=False)
    wheel = build(project)
    assert wheel.name.endswith("-none-any.whl")
    captured = capsys.readouterr()
    assert "The wheel holds no compiled kernels: no g++ was found." in captured.out + captured.err


def test_on_another_operating_system_a_pure_wheel_is_built(project, monkeypatch, capsys):
    monkeypatch.setattr(sys, "platform", "darwin")
    assert build(project).name.endswith("-none-any.whl")
    captured = capsys.readouterr()
    assert "kernels are compiled on Linux only" in captured.out + captured.err


def test_an_editable_installation_compiles_nothing(project):
    spec = spec_from_file_location("hatch_build_of_a_project", project / "hatch_build.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    build_data = {"force_include": {}, "pure_python": True}
    module.KernelHook(str(project), {}, None, None, str(project / "dist"), "wheel").initialize("editable", build_data)
    assert build_data == {"force_include": {}, "pure_python": True}
    assert not (project / "build").exists()


def test_a_level_unknown_to_the_compiler_is_left_out(project, monkeypatch, capsys):
    best = levels_of(*cpu_features())[-1]
    compiler = project / "g++"
    compiler.write_text(
        f'#!/bin/sh\ncase "$*" in *{best.flags[0]}" "*) echo "unknown {best.flags[0]}" >&2; exit 1;; esac\n'
        f'exec {shutil.which("g++")} "$@"\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", f"{project}{os.pathsep}{os.environ['PATH']}")
    with zipfile.ZipFile(build(project)) as archive:
        levels = {Path(name).parent.name for name in archive.namelist() if name.endswith(".so")}
    expected = {level.name for level in LEVELS if level.machine == platform.machine()} - {best.name}
    assert levels == expected
    captured = capsys.readouterr()
    assert f"The wheel holds no kernels of level {best.name}" in captured.out + captured.err
