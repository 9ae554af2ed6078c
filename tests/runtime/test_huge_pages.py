"""The page size of large tensors' memory; each test runs in a separate process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

#: Prints by how many MiB the huge pages of the process grow with a tensor of 32 MiB.
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
def test_large_tensors_use_huge_pages():
    assert grown() >= 16  # of 32 MiB; if memory is fragmented, the kernel may not find all huge pages


@needs_madvise
def test_the_users_setting_is_kept():
    assert grown(THP_MEM_ALLOC_ENABLE="0") == 0
