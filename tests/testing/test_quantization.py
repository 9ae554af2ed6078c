"""The conformance kit of quantizations finds what breaks the contract."""

import pytest
import torch
import torch.nn.functional as F

from graftlm.contracts import LinearKernel, Quantization
from graftlm.testing import QuantizationConformance, run_conformance


class HalfKernel(LinearKernel):
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


class Half(Quantization):
    """Keeps the contract."""

    kernel = HalfKernel

    def obstacle(self, layer):
        return "odd" if layer.in_features % 2 else None

    def convert(self, weight, bias):
        return self.kernel(weight, bias)


class ForgetsBias(HalfKernel):
    def __call__(self, x):
        return F.linear(x, self.decoded().to(x.dtype))


class Widens(HalfKernel):
    def __call__(self, x):
        return super().__call__(x).float()


class WrongFromManyRows(HalfKernel):
    def __call__(self, x):
        return super().__call__(x) * (1.1 if len(x) > 32 else 1)


class Flattens(HalfKernel):
    def __call__(self, x):
        return super().__call__(x.flatten(0, -2))


class Shuffles(HalfKernel):
    def __init__(self, weight, bias):
        super().__init__(weight.roll(1, dims=1), bias)


class Large(HalfKernel):
    num_bytes = 1 << 30


class Borrows(HalfKernel):
    def __init__(self, weight, bias):
        super().__init__(weight, bias)
        self.bias = bias


class Destroys(HalfKernel):
    def __init__(self, weight, bias):
        super().__init__(weight, bias)
        weight.zero_()


def failures(kernel_class):
    class Faulty(Half):
        kernel = kernel_class

    class Kit(QuantizationConformance):
        parameters = {"size": ((33, 64),), "has_bias": (False, True)}  # noqa: RUF012

        def create(self, context):
            return Faulty()

    return {result.name.partition("[")[0] for result in run_conformance(Kit) if result.error is not None}


@pytest.mark.parametrize(
    ("kernel", "expected"),
    [
        (HalfKernel, set()),
        (ForgetsBias, {"test_a_kernel_multiplies_with_its_decoded_weights"}),
        (Widens, {"test_a_kernel_multiplies_with_its_decoded_weights"}),
        (WrongFromManyRows, {"test_a_kernel_multiplies_with_its_decoded_weights"}),
        (Flattens, {"test_leading_dimensions_are_kept"}),
        (Shuffles, {"test_decoded_weights_are_close", "test_extreme_weights_are_decoded"}),
        (Large, {"test_a_converted_layer_is_smaller"}),
        (Borrows, {"test_the_weight_can_go"}),
        (
            Destroys,
            {
                "test_conversion_is_repeatable",
                "test_decoded_weights_are_close",
                "test_extreme_weights_are_decoded",
            },
        ),
    ],
)
def test_the_kit_finds_the_fault(kernel, expected):
    assert failures(kernel) == expected
