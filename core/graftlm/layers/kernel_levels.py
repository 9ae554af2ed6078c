"""The instruction-set levels for which kernels are compiled ahead of time.

`hatch_build.py` loads this file by its path, in an environment without graftlm's dependencies. The file therefore
imports only the standard library.
"""

import platform
import re
import sys
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path
from typing import Final

__all__ = ["BASE_FLAGS", "LEVELS", "NATIVE_FLAGS", "KernelLevel", "cpu_features", "levels_of", "source_flags"]

#: GCC's flags for every kernel and every level.
BASE_FLAGS: Final = ("-O3", "-std=c++17", "-fopenmp", "-shared", "-fPIC")
#: GCC's flags for exactly the CPU on which it runs.
NATIVE_FLAGS: Final = ("-march=native",)

#: A source lists additional flags in a comment: `// Compiler flags: -ffp-contract=fast`.
_SOURCE_FLAGS: Final = re.compile(r"^// Compiler flags: (.+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class KernelLevel:
    """A set of instructions.

    Attributes:
        name: name of the level in `model.kernels`.
        machine: machine type in the form of `platform.machine()`.
        flags: GCC's flags in addition to `BASE_FLAGS`.
        features: entries in Linux's /proc/cpuinfo of a CPU that has the instructions.
    """

    name: str
    machine: str
    flags: tuple[str, ...]
    features: frozenset[str]

    def missing(self, machine: str, features: AbstractSet[str]) -> list[str]:
        """Return the features that a CPU lacks for this level, sorted; empty if it supports the level.

        Args:
            machine: machine type in the form of `platform.machine()`.
            features: features of the CPU, from `cpu_features`.
        """
        return [f"a CPU of type {self.machine}"] if machine != self.machine else sorted(self.features - features)


_V2: Final = {"cx16", "lahf_lm", "pni", "popcnt", "sse4_1", "sse4_2", "ssse3"}
_V3: Final = _V2 | {"abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe", "xsave"}
_V4: Final = _V3 | {"avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl"}
_AVX512_BF16: Final = frozenset(_V4 | {"avx512_bf16", "avx512_vnni", "avx512vbmi"})
_AVX512_BF16_FLAGS: Final = ("-march=x86-64-v4", "-mavx512bf16", "-mavx512vnni", "-mavx512vbmi")

#: All levels; for each machine type, the best level is first.
LEVELS: Final = (
    KernelLevel(
        "amx",
        "x86_64",
        (*_AVX512_BF16_FLAGS, "-mamx-tile", "-mamx-bf16"),
        _AVX512_BF16 | {"amx_tile", "amx_bf16"},
    ),
    KernelLevel("avx512-bf16", "x86_64", _AVX512_BF16_FLAGS, _AVX512_BF16),
    KernelLevel("x86-64-v3", "x86_64", ("-march=x86-64-v3",), frozenset(_V3)),
    KernelLevel("armv8.2-a", "aarch64", ("-march=armv8.2-a",), frozenset({"asimd", "asimdrdm", "atomics", "crc32"})),
)


def levels_of(machine: str, features: AbstractSet[str]) -> Sequence[KernelLevel]:
    """Return the levels that a CPU supports, best first."""
    return [level for level in LEVELS if not level.missing(machine, features)]


def cpu_features() -> tuple[str, frozenset[str]]:
    """Return this CPU's machine type and features; no features if the operating system is not Linux."""
    machine = platform.machine()
    if sys.platform != "linux":
        return machine, frozenset()
    try:
        cpuinfo = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:  # a sandbox without /proc
        return machine, frozenset()
    listed = re.search(r"^(?:flags|Features)\s*:(.*)$", cpuinfo, re.MULTILINE)
    return machine, frozenset(listed[1].split()) if listed else frozenset()


def source_flags(source: Path) -> tuple[str, ...]:
    """Return the compiler flags in the comments of a C++ file."""
    named = _SOURCE_FLAGS.search(source.read_text(encoding="utf-8"))
    return tuple(named[1].split()) if named else ()
