import re
import shutil
import subprocess
from typing import get_args

import pytest

from graftlm.config.sections import ModelSettings
from graftlm.errors import ProviderUnavailableError
from graftlm.layers.kernel_choice import choosing_kernels, compile_level, shipped_levels
from graftlm.layers.kernel_levels import BASE_FLAGS, LEVELS, NATIVE_FLAGS, cpu_features, levels_of, source_flags

BY_NAME = {level.name: level for level in LEVELS}
HASWELL = BY_NAME["x86-64-v3"].features
ZEN_4 = BY_NAME["avx512-bf16"].features
SAPPHIRE_RAPIDS = BY_NAME["amx"].features | {"amx_int8", "avx512_fp16"}
NEOVERSE_N1 = {"fp", "asimd", "aes", "crc32", "atomics", "fphp", "asimdhp", "asimdrdm", "lrcpc", "asimddp"}


@pytest.mark.parametrize(
    ("machine", "features", "expected"),
    [
        ("x86_64", SAPPHIRE_RAPIDS, ["amx", "avx512-bf16", "x86-64-v3"]),
        ("x86_64", ZEN_4, ["avx512-bf16", "x86-64-v3"]),
        ("x86_64", ZEN_4 - {"avx512vbmi"}, ["x86-64-v3"]),  # Cooper Lake
        ("x86_64", HASWELL, ["x86-64-v3"]),
        ("x86_64", HASWELL - {"fma"}, []),
        ("x86_64", NEOVERSE_N1, []),
        ("aarch64", NEOVERSE_N1, ["armv8.2-a"]),
        ("aarch64", {"fp", "asimd", "crc32"}, []),  # Cortex-A72
        ("arm64", frozenset(), []),  # macOS
    ],
)
def test_a_cpu_supports_the_levels_whose_features_it_has(machine, features, expected):
    assert [level.name for level in levels_of(machine, features)] == expected


def test_the_configuration_names_every_level():
    names = get_args(ModelSettings.model_fields["kernels"].annotation)
    assert sorted(names) == sorted(["auto", "native", *BY_NAME])


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.parametrize(
    "level", [level for level in LEVELS if level.machine == cpu_features()[0]], ids=lambda x: x.name
)
def test_a_levels_flags_enable_only_its_listed_instructions(level):
    """GCC's macros, such as __AVX512BF16__, name the enabled instructions."""
    command = ["g++", *BASE_FLAGS, *level.flags, "-dM", "-E", "-x", "c++", "/dev/null"]
    macros = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    defined = {re.sub("_", "", name).lower() for name in re.findall(r"^#define __(\w+)__ 1$", macros, re.MULTILINE)}
    same_machine = [other for other in LEVELS if other.machine == level.machine]
    known = {re.sub("_", "", feature) for other in same_machine for feature in other.features}
    listed = {re.sub("_", "", feature) for feature in level.features}
    assert not (defined & known) - listed


def test_by_default_the_best_level_comes_first_and_compilation_is_native():
    assert list(shipped_levels()) == list(levels_of(*cpu_features()))
    assert compile_level() == ("native", NATIVE_FLAGS)


def test_native_uses_no_shipped_kernel():
    with choosing_kernels("native"):
        assert (list(shipped_levels()), compile_level()) == ([], ("native", NATIVE_FLAGS))
    assert list(shipped_levels()) == list(levels_of(*cpu_features()))


@pytest.mark.parametrize("level", levels_of(*cpu_features()), ids=lambda level: level.name)
def test_a_configured_level_is_used_and_compiled(level):
    with choosing_kernels(level.name):
        assert list(shipped_levels()) == [level]
        assert compile_level() == (level.name, level.flags)


def test_a_level_that_the_cpu_does_not_support_is_refused():
    lacking = next(level for level in LEVELS if level not in levels_of(*cpu_features()))
    message = f"cannot run kernels of level {lacking.name}: it lacks "
    with pytest.raises(ProviderUnavailableError, match=message), choosing_kernels(lacking.name):
        pass
    message = "no kernels 'sse'; expected auto, native, amx"
    with pytest.raises(ProviderUnavailableError, match=message), choosing_kernels("sse"):
        pass


def test_a_source_can_declare_its_own_flags(tmp_path):
    source = tmp_path / "tiny.cpp"
    source.write_text("// Adds.\n// Compiler flags: -ffp-contract=fast -fno-math-errno\nint x;\n")
    assert source_flags(source) == ("-ffp-contract=fast", "-fno-math-errno")
    source.write_text("int x;\n")
    assert source_flags(source) == ()
