"""Compiles a C++ source into a shared library, once per source, compiler and CPU, in a private cache directory."""

import ctypes
import hashlib
import os
import platform
import re
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from graftlm.errors import ProviderUnavailableError

__all__ = ["FLAGS", "KernelBuildError", "build_library", "load_library", "user_cache_dir"]

#: Headers that kernels share, plugins' too: `#include "graftlm/matrix_units.h"`.
_INCLUDE_DIR = Path(__file__).with_name("include")
FLAGS = ("-O3", "-march=native", "-std=c++17", "-fopenmp", "-shared", "-fPIC", f"-I{_INCLUDE_DIR}")

_COMPILE_LIMIT_S = 120.0
_SHOWN_ERROR_CHARS = 2000
_INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)


class KernelBuildError(ProviderUnavailableError):
    """A kernel cannot be compiled or loaded on this machine."""


def user_cache_dir(environ: Mapping[str, str]) -> Path:
    """Return the directory of graftlm's files in the user's cache directory (XDG Base Directory specification)."""
    base = environ.get("XDG_CACHE_HOME", "")
    # The specification has relative paths ignored.
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "graftlm"


def load_library(source: Path, compiler: str, cache_dir: Path, flags: Sequence[str] = ()) -> ctypes.CDLL:
    """Compile a source if need be, and load it. Its OpenMP runtime is the one that torch has loaded already.

    Raises:
        KernelBuildError: it cannot be compiled or loaded.
    """
    library = build_library(source, compiler, cache_dir, flags)
    try:
        return ctypes.CDLL(str(library))
    except OSError as error:
        raise KernelBuildError(f"cannot load the compiled kernel {library}: {error}") from error


def build_library(source: Path, compiler: str, cache_dir: Path, flags: Sequence[str] = ()) -> Path:
    """Return the shared library of a source, compiling it if the cache does not hold it.

    Processes may do this at the same time: each compiles into a file of its own and renames it into place, so that
    whoever looks finds either nothing or a whole library.

    Args:
        source: a C++ file. Headers of its own lie in its directory or below.
        compiler: a name on PATH or a path.
        cache_dir: created with mode 0700 if missing.
        flags: for the compiler, besides `FLAGS`.

    Raises:
        KernelBuildError: no compiler, the compiler fails, or the directory is not this user's alone to write.
    """
    if os.name != "posix":
        raise KernelBuildError(f"kernels are compiled on POSIX systems only, this is {os.name!r}. Set kernel: torch.")
    executable = shutil.which(compiler)
    if executable is None:
        raise KernelBuildError(f"no C++ compiler {compiler!r} found. Install g++, or set `compiler` to one's path.")
    options = [*FLAGS, *flags]
    library = cache_dir / f"{source.stem}-{_fingerprint(source, executable, options)}.so"
    try:
        _make_private(cache_dir)
        if not library.exists():
            _compile(source, executable, options, library)
    except OSError as error:
        raise KernelBuildError(f"cannot use the kernel cache {cache_dir}: {error}. Set `kernel_cache_dir`.") from error
    return library


def _fingerprint(source: Path, executable: str, options: Sequence[str]) -> str:
    """Hash everything that the machine code depends on."""
    version = _run([executable, "--version"]).stdout
    headers = (path.read_text(encoding="utf-8") for path in sorted(_INCLUDE_DIR.rglob("*.h")))
    parts = (*_texts(source, set()), *headers, *options, executable, version, _cpu())
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]


def _texts(source: Path, seen: set[Path]) -> Iterator[str]:
    """Yield the text of a source, then those of its own headers, each once."""
    seen.add(source)
    text = source.read_text(encoding="utf-8")
    yield text
    for name in _INCLUDE.findall(text):
        included = source.parent / name
        if included not in seen and included.exists():
            yield from _texts(included, seen)


def _cpu() -> str:
    """Name the CPU and its instruction sets: `-march=native` builds for exactly these."""
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists():
        return f"{platform.machine()} {platform.processor()}"
    wanted = ("vendor_id", "cpu family", "model", "model name", "flags", "Features", "CPU part")
    first_cpu = cpuinfo.read_text(encoding="utf-8").split("\n\n")[0]
    return "\n".join(line for line in first_cpu.splitlines() if line.split("\t")[0].strip() in wanted)


def _make_private(directory: Path) -> None:
    """Create a directory, or check that nobody else can put libraries into it."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = directory.stat()
    if status.st_uid != os.getuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise KernelBuildError(
            f"other users may write to the kernel cache {directory} (owner {status.st_uid}, mode "
            f"{stat.filemode(status.st_mode)}), so code in it is not trusted. Run `chmod 700` on it, or set "
            "`kernel_cache_dir`."
        )


def _compile(source: Path, executable: str, options: Sequence[str], library: Path) -> None:
    with tempfile.TemporaryDirectory(dir=library.parent, prefix="build-") as directory:
        unfinished = Path(directory) / library.name
        result = _run([executable, *options, str(source), "-o", str(unfinished)])
        if result.returncode != 0:
            raise KernelBuildError(
                f"{executable} could not compile {source.name}:\n{result.stderr[-_SHOWN_ERROR_CHARS:]}"
            )
        os.replace(unfinished, library)


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=_COMPILE_LIMIT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise KernelBuildError(f"{command[0]} did not end within {_COMPILE_LIMIT_S:.0f} s") from error
