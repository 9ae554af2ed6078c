"""Which OpenMP runtime a process computes on; each in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

#: Prints whether the runtime is loaded, and whether it hears how many threads PyTorch wants.
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
def test_pytorch_computes_on_the_installed_runtime():
    assert report("import graftlm, torch", GRAFTLM_OPENMP="") == ["True", "True"]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("imports", "environment"),
    [("import torch, graftlm", {}), ("import graftlm, torch", {"GRAFTLM_OPENMP": "system"})],
    ids=["pytorch came first", "switched off"],
)
def test_the_choice_is_left_alone(imports, environment):
    assert report(imports, **environment) == ["False", "False"]


@installed
def test_a_wait_that_the_user_has_set_is_kept():
    imports = "import os, graftlm, torch; assert os.environ['KMP_BLOCKTIME'] == '7'"
    assert report(imports, KMP_BLOCKTIME="7") == ["True", "True"]
