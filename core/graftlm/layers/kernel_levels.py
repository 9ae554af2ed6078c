"""The instruction-set levels that kernels are compiled for ahead of time.

`hatch_build.py` loads this file by its path, in an environment without graftlm's dependencies: it imports the standard
library only.
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

#: Of GCC, for every kernel and every level.
BASE_FLAGS: Final = ("-O3", "-std=c++17", "-fopenmp", "-shared", "-fPIC")
#: Of GCC, for exactly the CPU that compiles.
NATIVE_FLAGS: Final = ("-march=native",)

#: A source names flags that it needs besides these in a comment: `// Compiler flags: -ffp-contract=fast`.
_SOURCE_FLAGS: Final = re.compile(r"^// Compiler flags: (.+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class KernelLevel:
    """A set of instructions.

    Attributes:
        name: as `model.kernels` names it.
        machine: as `platform.machine()` names it.
        flags: of GCC, besides `BASE_FLAGS`.
        features: what Linux lists in /proc/cpuinfo for a CPU that has the instructions.
    """

    name: str
    machine: str
    flags: tuple[str, ...]
    features: frozenset[str]

    def missing(self, machine: str, features: AbstractSet[str]) -> list[str]:
        """Return what a CPU lacks for this level, sorted; nothing if it has the level.

        Args:
            machine: as `platform.machine()` names it.
            features: of the CPU, as `cpu_features` returns them.
        """
        return [f"a CPU of type {self.machine}"] if machine != self.machine else sorted(self.features - features)


_V2: Final = {"cx16", "lahf_lm", "pni", "popcnt", "sse4_1", "sse4_2", "ssse3"}
_V3: Final = _V2 | {"abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe", "xsave"}
_V4: Final = _V3 | {"avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl"}
_AVX512_BF16: Final = frozenset(_V4 | {"avx512_bf16", "avx512_vnni", "avx512vbmi"})
_AVX512_BF16_FLAGS: Final = ("-march=x86-64-v4", "-mavx512bf16", "-mavx512vnni", "-mavx512vbmi")

#: The best of each machine first.
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
    """Return the levels that a CPU has, the best first."""
    return [level for level in LEVELS if not level.missing(machine, features)]


def cpu_features() -> tuple[str, frozenset[str]]:
    """Return this CPU's machine type and features; no features where the operating system is not Linux."""
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
    """Return the compiler flags that a C++ file names in its comments."""
    named = _SOURCE_FLAGS.search(source.read_text(encoding="utf-8"))
    return tuple(named[1].split()) if named else ()
