"""Each quantization of this package keeps the contract, computed by the compiled kernel and by PyTorch."""

import pytest

from graftlm.testing import QuantizationConformance
from graftlm_quantization import provide_quantizations

PROVIDERS = {provider.name: provider for provider in provide_quantizations()}


class Kit(QuantizationConformance):
    name: str
    options: dict

    @pytest.fixture(autouse=True)
    def _compiled_once(self, request):
        self.kernel_cache = None
        if self.options["kernel"] == "native":
            request.getfixturevalue("library")  # compiles it, or skips
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
