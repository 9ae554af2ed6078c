import pytest
import torch

from graftlm.contracts import LinearLayer
from graftlm.layers.kernel_build import KernelBuildError
from graftlm_quantization import Int4Options, Int8Options
from graftlm_quantization.weight_only import WeightOnly

BY_TORCH = {"kernel": "torch"}


@pytest.mark.parametrize(
    ("bits", "options", "projections", "in_features", "expected"),
    [
        (4, {}, ("gate_proj", "up_proj"), 128, None),
        (4, {}, ("lm_head",), 128, "option keep names lm_head"),
        (4, {"keep": ()}, ("lm_head",), 128, None),
        (4, {"keep": ["v_proj"]}, ("q_proj", "k_proj", "v_proj"), 128, "option keep names v_proj"),
        (4, {}, ("o_proj",), 96, "its number of inputs, 96, is not a multiple of 64"),
        (4, {"group_size": 32}, ("o_proj",), 96, None),
        (8, {}, ("o_proj",), 96, None),
        (8, {}, ("o_proj",), 100, "its number of inputs, 100, is not a multiple of 8"),
        (8, {"group_size": 64}, ("o_proj",), 96, "its number of inputs, 96, is not a multiple of 64"),
    ],
)
def test_layers_that_stay_plain_are_reported_with_the_reason(bits, options, projections, in_features, expected):
    settings = (Int4Options if bits == 4 else Int8Options)(**options, **BY_TORCH)
    quantization = WeightOnly(bits, settings.group_size, settings)
    assert quantization.obstacle(LinearLayer("layers.0.some", projections, in_features, 64)) == expected


def test_without_a_compiler_pytorch_is_used_with_a_log_line(caplog):
    quantization = WeightOnly(4, 64, Int4Options(compiler="/nowhere/g++"))
    assert quantization.kernel == "torch"
    assert "which are slow: no C++ compiler '/nowhere/g++' found" in caplog.text
    assert quantization.convert(torch.randn(32, 64), None)(torch.randn(2, 64)).shape == (2, 32)


def test_a_required_native_kernel_fails_without_a_compiler():
    with pytest.raises(KernelBuildError, match="Install"):
        WeightOnly(4, 64, Int4Options(compiler="/nowhere/g++", kernel="native"))


def test_the_compiled_kernel_is_used_if_it_can_be_compiled(library, kernel_cache):
    assert WeightOnly(4, 64, Int4Options(kernel_cache_dir=kernel_cache)).kernel == "native"
