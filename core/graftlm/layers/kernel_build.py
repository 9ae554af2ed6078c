"""Loads the shared library of a C++ source: a shipped library, or one compiled once per source, compiler and CPU."""

import contextlib
import ctypes
import functools
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from graftlm.errors import ProviderUnavailableError
from graftlm.layers.kernel_choice import compile_level, shipped_levels
from graftlm.layers.kernel_key import kernel_key
from graftlm.layers.kernel_levels import BASE_FLAGS, source_flags
from graftlm.layers.sealed_file import find_flaw, find_other_writers, seal
from graftlm.layers.shipped_kernels import find_shipped
from graftlm.runtime.kernel_events import KernelUse, kernel_refused, kernel_used, say

__all__ = ["KernelBuildError", "build_library", "load_library", "user_cache_dir"]

_logger = logging.getLogger(__name__)

#: Headers that kernels share, also those of plugins: `#include "graftlm/matrix_units.h"`.
_INCLUDE_DIR = Path(__file__).with_name("include")

_COMPILE_LIMIT_S = 120.0
#: Longest wait for another process that compiles the same kernel. After it, this process also compiles the kernel.
_WAIT_LIMIT_S = 2 * _COMPILE_LIMIT_S
_LOOK_AGAIN_S = 0.05
_SHOWN_ERROR_CHARS = 2000
_MISSING = "is missing"
_BUILD_PREFIX = "build-"
#: Maximum age of a compilation's folder in seconds. No compilation takes as long, so an older folder belongs to a
#: process that was killed.
_DEAD_BUILD_S = 3600.0


class KernelBuildError(ProviderUnavailableError):
    """A kernel cannot be compiled or loaded on this machine."""


def user_cache_dir(environ: Mapping[str, str]) -> Path:
    """Return the directory of graftlm's files in the user's cache directory (XDG Base Directory specification)."""
    base = environ.get("XDG_CACHE_HOME", "")
    # The specification requires that relative paths are ignored.
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "graftlm"


def load_library(
    source: Path, compiler: str, cache_dir: Path, flags: Sequence[str] = (), include_dir: Path = _INCLUDE_DIR
) -> ctypes.CDLL:
    """Load the library of a source: a shipped library that fits the CPU, else one from the cache, compiled if needed.

    The library uses the OpenMP runtime that torch has already loaded.

    Args, Effects and Raises are those of `build_library`. KernelBuildError is also raised if a compiled library cannot
    be loaded. Such a library is unchanged since the compiler wrote it, so compiling it again would not help.
    """
    shipped = _load_shipped(source, flags, include_dir)
    if shipped is not None:
        return shipped
    library = build_library(source, compiler, cache_dir, flags, include_dir)
    try:
        return ctypes.CDLL(str(library))
    except OSError as error:
        reason = f"cannot load the compiled kernel {library}: {error}"
        kernel_refused(source.stem, reason)
        raise KernelBuildError(reason) from error


def _load_shipped(source: Path, flags: Sequence[str], include_dir: Path) -> ctypes.CDLL | None:
    """Load a shipped library; None if there is none for the source and the CPU, or it cannot be loaded."""
    start_s = time.monotonic()
    found = find_shipped(source, [*source_flags(source), *flags], include_dir, shipped_levels())
    if found is None:
        return None
    library, level = found
    try:
        loaded = ctypes.CDLL(str(library))
    except OSError as error:  # for example because of another C library
        _logger.warning("cannot load the kernel %s of the installed package: %s", library, error)
        return None
    kernel_used(KernelUse(source.stem, library, time.monotonic() - start_s, "wheel", level.name))
    return loaded


def build_library(
    source: Path, compiler: str, cache_dir: Path, flags: Sequence[str] = (), include_dir: Path = _INCLUDE_DIR
) -> Path:
    """Return the shared library of a source, compiling it if it is not in the cache.

    If several processes need the same library at the same time, one process compiles it and the other processes wait.
    The file is renamed into place once it is complete and sealed. A cached library that is damaged, or that other users
    may write to, is compiled again.

    Args:
        source: a C++ file. Its own headers are in its folder or below.
        compiler: compiler, as a name on PATH or a path.
        cache_dir: folder of compiled libraries; created with mode 0700 if missing.
        flags: additional compiler flags. The other flags are `BASE_FLAGS`, the flags of the chosen instruction sets,
            and the flags in the source.
        include_dir: folder of the headers that kernels share.

    Effects: notifies the watches of `kernel_events`; logs each compilation and its time.

    Raises:
        KernelBuildError: the compiler is missing or fails, or users other than this user and root may write to the
            folder.
    """
    start_s = time.monotonic()
    level, level_flags = compile_level()
    options = [*BASE_FLAGS, *level_flags, *source_flags(source), *flags]
    try:
        library, compiled = _find_or_compile(source, compiler, cache_dir, options, include_dir)
    except KernelBuildError as error:
        kernel_refused(source.stem, str(error))
        raise
    seconds = time.monotonic() - start_s
    kernel_used(KernelUse(source.stem, library, seconds, "compiled" if compiled else "cache", level))
    return library


def _find_or_compile(
    source: Path, compiler: str, cache_dir: Path, options: Sequence[str], include_dir: Path
) -> tuple[Path, bool]:
    """Return the library, and whether this call compiled it."""
    if sys.platform != "linux":
        raise KernelBuildError(f"kernels are compiled on Linux only, this is {sys.platform!r}.")
    executable = shutil.which(compiler)
    if executable is None:
        raise KernelBuildError(
            f"no C++ compiler {compiler!r} found. Install g++, or set `compiler` to the path of a compiler."
        )
    try:
        file = os.stat(executable)
        version = _compiler_version(executable, file.st_ino, file.st_size, file.st_mtime_ns)
        library = cache_dir / f"{source.stem}-{kernel_key(source, [include_dir], options, version)}.so"
        _make_private(cache_dir)
        flaw = _flaw(library)
        if flaw is None:
            return library, False
        if flaw is not _MISSING:
            _logger.warning("the compiled kernel %s %s. It is compiled again", library, flaw)
        with _lock(library):
            if _flaw(library) is None:  # another process compiled it meanwhile
                return library, False
            library.unlink(missing_ok=True)
            _remove_dead_builds(cache_dir)
            _compile(source, executable, [*options, f"-I{include_dir}"], library)
    except OSError as error:
        raise KernelBuildError(f"cannot use the kernel cache {cache_dir}: {error}. Set `kernel_cache_dir`.") from error
    return library, True


@functools.lru_cache(maxsize=16)
def _compiler_version(executable: str, inode: int, size: int, mtime_ns: int) -> str:
    """Return the output of a compiler's `--version`. Every kernel of a start needs it; a changed file has a new key."""
    return _run([executable, "--version"]).stdout


def _flaw(library: Path) -> str | None:
    """Return the reason why a library cannot be loaded, as "is ..."; None: it can be loaded."""
    try:
        return find_flaw(library)
    except FileNotFoundError:
        return _MISSING


def _remove_dead_builds(cache_dir: Path) -> None:
    """Remove the folders of compilations whose processes were killed."""
    for folder in cache_dir.glob(f"{_BUILD_PREFIX}*"):
        with contextlib.suppress(OSError):  # another process removes it too
            if time.time() - folder.stat().st_mtime > _DEAD_BUILD_S:
                shutil.rmtree(folder)


@contextlib.contextmanager
def _lock(library: Path) -> Iterator[None]:
    """Lock a library for compilation until the context ends; first wait while another process or thread has locked it.

    The operating system releases the lock of a process that dies. On a file system without locks, each process
    compiles.
    """
    path = library.with_suffix(".lock")
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        if not _try_lock(descriptor):
            line = f"waiting for another process, which compiles {_name(library)}"
            _logger.info("%s", line)
            say(line)
            end_s = time.monotonic() + _WAIT_LIMIT_S
            while _flaw(library) is not None and not _try_lock(descriptor) and time.monotonic() < end_s:
                time.sleep(_LOOK_AGAIN_S)
        yield
    finally:
        path.unlink(missing_ok=True)  # at worst, two processes compile the library
        os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    """Lock a file; return False if its lock is not free. On a file system without locks, the result is True."""
    import fcntl  # POSIX only

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def _name(library: Path) -> str:
    """Return the name of the source of a library."""
    return library.stem.rpartition("-")[0]


def _make_private(directory: Path) -> None:
    """Create a folder, or check that no other user can put libraries into it."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    writers = find_other_writers(directory.stat(), os.getuid())
    if writers is not None:
        raise KernelBuildError(
            f"the kernel cache {directory} is not trusted: {writers}. Run `chmod go-w` on it, or set "
            "`kernel_cache_dir` to a folder of this user."
        )


def _compile(source: Path, executable: str, options: Sequence[str], library: Path) -> None:
    start_s = time.monotonic()
    line = f"compiling the kernel {source.stem} for this CPU, once (some seconds)"
    _logger.info("%s", line)
    say(line)
    with tempfile.TemporaryDirectory(dir=library.parent, prefix=_BUILD_PREFIX) as directory:
        unfinished = Path(directory) / library.name
        result = _run([executable, *options, str(source), "-o", str(unfinished)])
        if result.returncode != 0:
            raise KernelBuildError(
                f"{executable} could not compile {source.name}:\n{result.stderr[-_SHOWN_ERROR_CHARS:]}"
            )
        seal(unfinished)
        os.replace(unfinished, library)
    line = f"compiled the kernel {source.stem} in {time.monotonic() - start_s:.1f} s"
    _logger.info("%s", line)
    say(line)


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command,
            capture_output=True,
            encoding="utf-8",
            errors="replace",  # file names in messages may have any encoding
            timeout=_COMPILE_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise KernelBuildError(f"{command[0]} did not end within {_COMPILE_LIMIT_S:.0f} s") from error
    except OSError as error:
        raise KernelBuildError(
            f"cannot run the compiler {command[0]}: {error}. Set `compiler` to another compiler."
        ) from error
