"""Loads the OpenMP runtime of PyTorch's and graftlm's kernels.

PyTorch's CPU build contains GNU's runtime. In a process with more threads than cores, such as an engine, GNU's threads
sleep between parallel regions. A decode step has about 200 regions. Waking the threads takes as long as the work of a
region; docs/performance.md has figures. LLVM's runtime, from the package `intel-openmp`, implements GNU's entry points
and spins for a millisecond before it sleeps. If it is loaded first, all libraries use it.
"""

import ctypes
import os
import site
import sys
from pathlib import Path
from typing import Final

__all__ = ["load_openmp"]

#: Environment variable; if it is "system", each library loads its own runtime.
_SWITCH: Final = "GRAFTLM_OPENMP"

_LIBRARY: Final = "libiomp5.so"

#: Time in milliseconds for which threads spin: longer than the time between two regions of a step, shorter than the
#: time between two steps of an idle engine.
_BLOCK_TIME_MS: Final = "1"


def load_openmp() -> Path | None:
    """Load LLVM's runtime into the process before PyTorch loads its own.

    Returns: the library; None if it is not installed, is disabled, or PyTorch is already imported.
    """
    if "torch" in sys.modules or not sys.platform.startswith("linux") or os.environ.get(_SWITCH) == "system":
        return None
    library = _installed()
    if library is None:
        return None
    os.environ.setdefault("KMP_BLOCKTIME", _BLOCK_TIME_MS)
    try:
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    except OSError:  # a build for another kind of machine; PyTorch then uses its own runtime
        return None
    return library


def _installed() -> Path | None:
    """Return the library that pip installed, or None."""
    folders = (sys.prefix, site.USER_BASE)
    paths = (Path(folder) / "lib" / _LIBRARY for folder in folders if folder is not None)
    return next((path for path in paths if path.is_file()), None)
