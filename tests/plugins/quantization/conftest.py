import shutil

import pytest

from graftlm_quantization.native_linear import NativeLibrary


@pytest.fixture(scope="session")
def library(kernel_cache) -> NativeLibrary:
    """The compiled kernel."""
    if shutil.which("g++") is None:
        pytest.skip("no g++ here: the compiled kernel cannot be tested")
    return NativeLibrary.load("g++", kernel_cache)
