"""Which pages of memory PyTorch's large tensors stand in on Linux.

A decode step reads gigabytes of weights once, and with pages of 4 KiB the processor looks one up for each 64 lines of
them. PyTorch's allocator asks the kernel for pages of 2 MiB if it is told to; docs/performance.md has what they gain.
"""

import os
import sys
from typing import Final

__all__ = ["want_huge_pages"]

#: What PyTorch's allocator looks at, once, when it serves the first large tensor.
_SWITCH: Final = "THP_MEM_ALLOC_ENABLE"


def want_huge_pages() -> None:
    """Have tensors from 2 MiB on stand in huge pages, unless the user has said otherwise (`THP_MEM_ALLOC_ENABLE=0`).

    The kernel may still say no: `/sys/kernel/mm/transparent_hugepage/enabled` has to be `madvise` or `always`.
    """
    if sys.platform.startswith("linux"):
        os.environ.setdefault(_SWITCH, "1")
