import ctypes
import shutil

import pytest

from graftlm_attention.native_paged import load_kernel


@pytest.fixture(scope="session")
def kernel(kernel_cache) -> ctypes.CDLL:
    """The compiled kernel."""
    if shutil.which("g++") is None:
        pytest.skip("no g++ here: the compiled kernel cannot be tested")
    return load_kernel("g++", kernel_cache)
