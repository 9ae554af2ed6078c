"""Each quantization of this package keeps the contract, with the compiled kernel and with PyTorch."""

from typing import ClassVar

import pytest
import torch

from graftlm.testing import QuantizationConformance
from graftlm_quantization import Fp8Options, provide_quantizations
from graftlm_quantization.fp8 import Fp8, multiply_in_float32

PROVIDERS = {provider.name: provider for provider in provide_quantizations()}


class Kit(QuantizationConformance):
    name: str
    options: dict

    @pytest.fixture(autouse=True)
    def _compiled_once(self, request):
        self.kernel_cache = None
        if self.options["kernel"] == "native":
            request.getfixturevalue("library")  # compiles the kernel, or skips
            self.kernel_cache = request.getfixturevalue("kernel_cache")

    def create(self, context):
        provider = PROVIDERS[self.name]
        options = provider.options(**self.options, kernel_cache_dir=self.kernel_cache)
        return provider.create(options, context)


class TestInt4(Kit):
    name, options = "int4", {"kernel": "native"}


class TestInt4InLargeGroups(Kit):
    name, options = "int4", {"kernel": "native", "group_size": 128}


class TestInt4InSmallGroupsByTorch(Kit):
    name, options = "int4", {"kernel": "torch", "group_size": 32}


class TestInt8(Kit):
    name, options, largest_error = "int8", {"kernel": "native"}, 0.01


class TestInt8InGroups(Kit):
    name, options, largest_error = "int8", {"kernel": "native", "group_size": 32}, 0.01


class TestInt8ByTorch(Kit):
    name, options, largest_error = "int8", {"kernel": "torch"}, 0.01


class Fp8Kit(QuantizationConformance):
    dtypes, largest_error, product_error = ("bfloat16",), 0.04, 0.06
    parameters: ClassVar = QuantizationConformance.parameters | {"size": ((32, 128), (208, 256), (16, 1024))}


class TestFp8InFloat32(Fp8Kit):
    def create(self, context):
        return Fp8(Fp8Options(), multiply_in_float32)


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9),
    reason="needs a CUDA device that multiplies fp8",
)
class TestFp8OnADevice(Fp8Kit):
    device = "cuda"

    def create(self, context):
        provider = PROVIDERS["fp8"]
        return provider.create(provider.options(), context)
