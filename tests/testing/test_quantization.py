"""The conformance kit of quantizations finds each faulty quantization."""

import pytest
import torch
import torch.nn.functional as F

from graftlm.contracts import LinearKernel, Quantization
from graftlm.testing import QuantizationConformance, run_conformance


class Float8Kernel(LinearKernel):
    """Weights in 8 bits of floating point, decoded at each product."""

    def __init__(self, weight, bias):
        self.scale = weight.abs().amax().float().clamp(min=1e-12) / 256
        self.weight = (weight.float() / self.scale).to(torch.float8_e4m3fn)
        self.bias = None if bias is None else bias.clone()

    @property
    def num_bytes(self):
        return self.weight.nbytes + 4

    def __call__(self, x):
        return F.linear(x, self.decoded().to(x.dtype), self.bias)

    def decoded(self):
        return self.weight.float() * self.scale


class Float8(Quantization):
    """Meets the contract."""

    kernel = Float8Kernel

    def obstacle(self, layer):
        return "odd" if layer.in_features % 2 else None

    def convert(self, weight, bias):
        return self.kernel(weight, bias)


class ForgetsBias(Float8Kernel):
    def __call__(self, x):
        return F.linear(x, self.decoded().to(x.dtype))


class ReturnsFloat32(Float8Kernel):
    def __call__(self, x):
        return super().__call__(x).float()


class WrongForManyRows(Float8Kernel):
    def __call__(self, x):
        return super().__call__(x) * (1.1 if len(x) > 32 else 1)


class FlattensLeadingDimensions(Float8Kernel):
    def __call__(self, x):
        return super().__call__(x.flatten(0, -2))


class RollsColumns(Float8Kernel):
    def __init__(self, weight, bias):
        super().__init__(weight.roll(1, dims=1), bias)


class ReportsALargeSize(Float8Kernel):
    num_bytes = 1 << 30


class KeepsTheCallersBias(Float8Kernel):
    def __init__(self, weight, bias):
        super().__init__(weight, bias)
        self.bias = bias


class ZeroesTheWeight(Float8Kernel):
    def __init__(self, weight, bias):
        super().__init__(weight, bias)
        weight.zero_()


def failures(kernel_class):
    class Faulty(Float8):
        kernel = kernel_class

    class Kit(QuantizationConformance):
        parameters = {"size": ((33, 64),), "has_bias": (False, True)}  # noqa: RUF012

        def create(self, context):
            return Faulty()

    return {result.name.partition("[")[0] for result in run_conformance(Kit) if result.error is not None}


@pytest.mark.parametrize(
    ("kernel", "expected"),
    [
        (Float8Kernel, set()),
        (ForgetsBias, {"test_a_kernel_multiplies_with_its_decoded_weights"}),
        (ReturnsFloat32, {"test_a_kernel_multiplies_with_its_decoded_weights"}),
        (WrongForManyRows, {"test_a_kernel_multiplies_with_its_decoded_weights"}),
        (FlattensLeadingDimensions, {"test_leading_dimensions_are_kept"}),
        (RollsColumns, {"test_decoded_weights_are_close", "test_extreme_weights_are_decoded"}),
        (ReportsALargeSize, {"test_a_converted_layer_is_smaller"}),
        (KeepsTheCallersBias, {"test_the_weight_can_go"}),
        (
            ZeroesTheWeight,
            {
                "test_conversion_is_repeatable",
                "test_decoded_weights_are_close",
                "test_extreme_weights_are_decoded",
            },
        ),
    ],
)
def test_the_kit_finds_a_faulty_kernel(kernel, expected):
    assert failures(kernel) == expected
