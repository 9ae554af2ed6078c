"""The OpenMP runtime that a process uses; each test runs in a separate process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

#: Prints whether the runtime is loaded, and whether PyTorch's thread count is passed to it.
REPORT = """
import ctypes
torch.set_num_threads(3)
torch.ones(100, 100) @ torch.ones(100, 100)
loaded = "libiomp5" in open("/proc/self/maps").read()
print(loaded, loaded and ctypes.CDLL("libiomp5.so").omp_get_max_threads() == 3)
"""


def report(imports, **environment):
    done = subprocess.run(
        [sys.executable, "-c", imports + REPORT],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


installed = pytest.mark.skipif(
    not (Path(sys.prefix) / "lib" / "libiomp5.so").exists(), reason="the extra `cpu` has nothing for this machine"
)


@installed
@pytest.mark.full  # the last test has the same report
def test_pytorch_uses_the_installed_runtime():
    assert report("import graftlm, torch", GRAFTLM_OPENMP="") == ["True", "True"]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("imports", "environment"),
    [("import torch, graftlm", {}), ("import graftlm, torch", {"GRAFTLM_OPENMP": "system"})],
    ids=["pytorch came first", "switched off"],
)
def test_the_runtime_is_not_loaded_after_pytorch_or_if_switched_off(imports, environment):
    assert report(imports, **environment) == ["False", "False"]


@installed
def test_the_users_blocktime_is_kept():
    imports = "import os, graftlm, torch; assert os.environ['KMP_BLOCKTIME'] == '7'"
    assert report(imports, KMP_BLOCKTIME="7") == ["True", "True"]
