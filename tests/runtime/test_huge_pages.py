"""Which pages large tensors stand in; each in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

#: Prints by how many MiB of huge pages a tensor of 32 MiB has made the process grow.
REPORT = """
import graftlm, torch
def huge():
    with open("/proc/self/smaps_rollup") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("AnonHugePages"))
before = huge()
held = torch.ones(8 << 20)
print((huge() - before) // 1024)
"""
SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")
needs_madvise = pytest.mark.skipif(
    not SETTING.exists() or "[madvise]" not in SETTING.read_text(), reason="the kernel decides without being asked"
)


def grown(**environment):
    kept = {name: value for name, value in os.environ.items() if name != "THP_MEM_ALLOC_ENABLE"}
    done = subprocess.run(
        [sys.executable, "-c", REPORT], env=kept | environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@needs_madvise
def test_large_tensors_stand_in_huge_pages():
    assert grown() >= 16  # of 32: where memory is in pieces, the kernel may not find all


@needs_madvise
def test_what_the_user_has_set_is_kept():
    assert grown(THP_MEM_ALLOC_ENABLE="0") == 0
