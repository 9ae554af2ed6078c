import shutil
from pathlib import Path

import pytest

from graftlm_quantization.native_linear import NativeLibrary


@pytest.fixture(scope="session")
def kernel_cache(tmp_path_factory) -> Path:
    """Where this session's compiled kernel goes: it is compiled once."""
    return tmp_path_factory.mktemp("quantization-kernels") / "cache"


@pytest.fixture(scope="session")
def library(kernel_cache) -> NativeLibrary:
    """The compiled kernel."""
    if shutil.which("g++") is None:
        pytest.skip("no g++ here: the compiled kernel cannot be tested")
    return NativeLibrary.load("g++", kernel_cache)
