"""Which OpenMP runtime PyTorch's kernels and ours run on.

PyTorch's CPU build brings GNU's, whose threads fall asleep between parallel regions as soon as a process has more
threads than cores, as an engine has. A decode step has some two hundred regions, and waking for each costs as much as
the work; docs/performance.md has figures. LLVM's runtime, which the package `intel-openmp` ships and which knows GNU's
entry points, waits a millisecond before it sleeps. Loaded first, it is the one that every library finds.
"""

import ctypes
import os
import site
import sys
from pathlib import Path
from typing import Final

__all__ = ["load_openmp"]

#: Set to "system" to leave the choice to the libraries themselves.
_SWITCH: Final = "GRAFTLM_OPENMP"

_LIBRARY: Final = "libiomp5.so"

#: Milliseconds for which threads wait for the next region: longer than what lies between two regions of a step, shorter
#: than what lies between two steps of an idle engine.
_BLOCK_TIME_MS: Final = "1"


def load_openmp() -> Path | None:
    """Load the runtime into the process, before PyTorch chooses its own.

    Returns: the library; None where it is not installed, not wanted, or too late, because PyTorch has been imported.
    """
    if "torch" in sys.modules or not sys.platform.startswith("linux") or os.environ.get(_SWITCH) == "system":
        return None
    library = _installed()
    if library is None:
        return None
    os.environ.setdefault("KMP_BLOCKTIME", _BLOCK_TIME_MS)
    try:
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    except OSError:  # for another kind of machine: PyTorch has its own
        return None
    return library


def _installed() -> Path | None:
    """Return where pip has put the library."""
    folders = (sys.prefix, site.USER_BASE)
    paths = (Path(folder) / "lib" / _LIBRARY for folder in folders if folder is not None)
    return next((path for path in paths if path.is_file()), None)
