"""Enables huge pages for PyTorch's large tensors on Linux.

A decode step reads gigabytes of weights once. With pages of 4 KiB, the processor needs a new TLB entry every 64 cache
lines. PyTorch's allocator can request pages of 2 MiB; docs/performance.md has the measured gain.
"""

import os
import sys
from typing import Final

__all__ = ["enable_huge_pages"]

#: The environment variable that PyTorch's allocator reads once, at the first large allocation.
_SWITCH: Final = "THP_MEM_ALLOC_ENABLE"


def enable_huge_pages() -> None:
    """Allocate tensors of at least 2 MiB in huge pages, unless `THP_MEM_ALLOC_ENABLE` is already set.

    This has an effect only if `/sys/kernel/mm/transparent_hugepage/enabled` is `madvise` or `always`.
    """
    if sys.platform.startswith("linux"):
        os.environ.setdefault(_SWITCH, "1")
