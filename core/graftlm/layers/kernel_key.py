"""Computes the key of a compiled kernel: a hash of the inputs of its machine code, without paths.

`hatch_build.py` loads this file by its path, in an environment without graftlm's dependencies. The file therefore
imports only the standard library.
"""

import hashlib
import platform
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

__all__ = ["kernel_key", "shipped_name"]

_INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)
_KEY_CHARS = 20
_CPU_ENTRIES = ("vendor_id", "cpu family", "model", "model name", "flags", "Features", "CPU part")


def kernel_key(source: Path, include_dirs: Sequence[Path], flags: Sequence[str], compiler_version: str) -> str:
    """Return the key of a source when it is compiled on this machine.

    Equal files in other folders, such as another virtual environment or another clone, have the same key. Kernels
    include no headers of torch and are not linked with torch, so torch's version is not part of the key.

    Args:
        source: a C++ file.
        include_dirs: folders that are searched for `#include "..."` after the folder of the including file.
        flags: compiler flags, without those that contain folders.
        compiler_version: output of the compiler's `--version`.
    """
    compiler = [line for line in compiler_version.splitlines() if not line.startswith("InstalledDir:")]
    return _hash([*_texts(source, include_dirs, set()), *flags, *compiler, *platform.libc_ver(), _cpu()])


class _Level(Protocol):
    """The fields of a `KernelLevel` that are read."""

    @property
    def name(self) -> str: ...

    @property
    def flags(self) -> Sequence[str]: ...


def shipped_name(source: Path, include_dir: Path, level: _Level, flags: Sequence[str]) -> str:
    """Return the path, below the folder of shipped kernels, of a library that is compiled for a level.

    Args:
        source: a C++ file.
        include_dir: folder of the headers that kernels share.
        level: level for which the library is compiled.
        flags: compiler flags in addition to those of every kernel and of the level.
    """
    key = _hash([*_texts(source, [include_dir], set()), *level.flags, *flags])
    return f"{level.name}/{source.stem}-{key}.so"


def _hash(parts: Sequence[str]) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:_KEY_CHARS]


def _texts(source: Path, include_dirs: Sequence[Path], seen: set[Path]) -> Iterator[str]:
    """Yield the text of a source, then the texts of the headers that it includes, each once."""
    seen.add(source)
    text = source.read_text(encoding="utf-8")
    yield text
    for name in _INCLUDE.findall(text):
        candidates = [folder / name for folder in (source.parent, *include_dirs)]
        included = next((path for path in candidates if path.exists()), None)
        if included is not None and included not in seen:
            yield from _texts(included, include_dirs, seen)


def _cpu() -> str:
    """Return the CPU and its instruction sets, which are the target of `-march=native`."""
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists():
        return f"{platform.machine()} {platform.processor()}"
    first_cpu = cpuinfo.read_text(encoding="utf-8").split("\n\n")[0]
    return "\n".join(line for line in first_cpu.splitlines() if line.split("\t")[0].strip() in _CPU_ENTRIES)
