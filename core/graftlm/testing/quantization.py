"""The conformance kit for quantizations."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar
from unittest import SkipTest

import torch
from torch import Tensor

from graftlm.contracts import LinearKernel, LinearLayer, Quantization, QuantizationContext
from graftlm.testing.conformance import Conformance

__all__ = ["QuantizationConformance"]

#: Largest allowed error of a product, relative to its largest absolute value; enough for a few roundings.
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 4e-3}

_ROWS = (1, 2, 3, 7, 12, 13, 31, 32, 65)


class QuantizationConformance(Conformance, ABC):
    """The kit for the contract `Quantization`.

        class TestMyQuantization(QuantizationConformance):
            def create(self, context):
                return MyQuantization(context.dtype)

    Attributes:
        parameters: `size` is (N, K) of a layer; a size is skipped if `obstacle` returns a reason. `has_bias` is
            whether the layer has a bias.
        dtypes: names of the dtypes of weights and activations that must work.
        device: the torch device type to test on.
        largest_error: largest error of decoded weights, relative to the norm of the weight. The default is enough for
            4 bits.
        product_error: largest error of a product, relative to its largest absolute value, for a quantization that also
            rounds activations. None: the error of a few roundings in the dtype.
    """

    parameters: ClassVar[Mapping[str, Sequence[Any]]] = {
        "size": ((32, 128), (200, 256), (1, 64), (70, 96), (33, 1024)),
        "has_bias": (False, True),
    }
    dtypes: ClassVar[Sequence[str]] = ("float32", "bfloat16")
    device: ClassVar[str] = "cpu"
    largest_error: ClassVar[float] = 0.15
    product_error: ClassVar[float | None] = None

    @abstractmethod
    def create(self, context: QuantizationContext) -> Quantization:
        """Return a new quantization."""

    def converted(self, dtype: torch.dtype, size: tuple[int, int], has_bias: bool) -> tuple[LinearKernel, Tensor, Any]:
        """Return (new kernel, its original weight [N, K], its bias [N] or None).

        Raises:
            SkipTest: the quantization does not support the layer.
        """
        quantization = self.create(QuantizationContext(torch.device(self.device), dtype))
        obstacle = quantization.obstacle(LinearLayer("layers.0.mlp.down", ("down_proj",), size[1], size[0]))
        if obstacle is not None:
            raise SkipTest(obstacle)
        weight, bias = self._weight(dtype, size), None
        if has_bias:
            bias = self._draw(size[0], seed=2).to(dtype)
        return quantization.convert(weight, bias), weight, bias

    def test_a_kernel_multiplies_with_its_decoded_weights(self, size: tuple[int, int], has_bias: bool) -> None:
        """A kernel computes x W^T + bias, where W are its decoded weights, up to rounding, for any number of rows."""
        for dtype in self._dtypes():
            kernel, _, bias = self.converted(dtype, size, has_bias)
            for num_rows in _ROWS:
                largest = _TOLERANCE[dtype] if self.product_error is None else self.product_error
                x = self._draw(num_rows, size[1], seed=num_rows).to(dtype)
                expected = x.float() @ kernel.decoded().T
                if bias is not None:
                    expected += bias.float()
                out = kernel(x)
                assert out.dtype is dtype, f"the product of {dtype} inputs has the dtype {out.dtype}"
                assert out.shape == expected.shape, f"expected {list(expected.shape)}, got {list(out.shape)}"
                error = float((out.float() - expected).abs().max() / expected.abs().max())
                assert error <= largest, (
                    f"the product of {num_rows} rows of {dtype} has an error of {error:.2g} of its largest value"
                )

    def test_leading_dimensions_are_kept(self) -> None:
        """A kernel maps [..., K] to [..., N], also for 0 rows."""
        dtype = self._dtypes()[0]
        kernel, _, _ = self.converted(dtype, (32, 128), has_bias=False)
        x = self._draw(6, 128, seed=3).to(dtype)
        out = kernel(x.view(2, 3, 128))
        assert out.shape == (2, 3, 32), f"expected [2, 3, 32], got {list(out.shape)}"
        assert torch.equal(out.view(6, 32), kernel(x))
        assert kernel(x[:0]).shape == (0, 32)

    def test_decoded_weights_are_close(self, size: tuple[int, int]) -> None:
        """Decoded weights are close to the original weight."""
        for dtype in self._dtypes():
            kernel, weight, _ = self.converted(dtype, size, has_bias=False)
            error = float((kernel.decoded() - weight.float()).norm() / weight.float().norm())
            assert error <= self.largest_error, f"decoded weights have an error of {error:.2g} of the weight's norm"

    def test_extreme_weights_are_decoded(self) -> None:
        """Rows of zeros, of equal weights and of one large weight decode to finite weights that are close."""
        dtype = self._dtypes()[0]
        quantization = self.create(QuantizationContext(torch.device(self.device), dtype))
        weight = torch.zeros(4, 128, dtype=dtype, device=self.device)
        weight[1], weight[2, 5], weight[3] = 0.25, 8.0, -0.5
        decoded = quantization.convert(weight, None).decoded()
        error = (decoded - weight.float()).abs().amax(dim=1)
        assert torch.equal(decoded[0], torch.zeros_like(decoded[0])), "weights of 0 are not decoded as 0"
        is_close = bool((error <= 0.15 * weight.float().abs().amax(dim=1)).all())
        assert is_close, f"the decoded rows have errors of {error.tolist()}"

    def test_a_converted_layer_is_smaller(self) -> None:
        """A converted layer takes less memory than its bfloat16 weight."""
        kernel, weight, _ = self.converted(self._dtypes()[0], (320, 1024), has_bias=False)
        assert 0 < kernel.num_bytes < 2 * weight.numel()

    def test_the_weight_can_go(self) -> None:
        """A kernel keeps no reference to the original weight and bias, so they can be freed or overwritten."""
        dtype = self._dtypes()[0]
        kernel, weight, bias = self.converted(dtype, (64, 128), has_bias=True)
        x = self._draw(3, 128, seed=4).to(dtype)
        before = kernel(x)
        weight.zero_()
        bias.zero_()
        assert torch.equal(kernel(x), before), "the kernel still reads the original weight or bias"

    def test_conversion_is_repeatable(self) -> None:
        """`convert` changes neither weight nor bias, and gives the same kernel each time."""
        dtype = self._dtypes()[0]
        first, weight, bias = self.converted(dtype, (64, 128), has_bias=True)
        second, again, bias_again = self.converted(dtype, (64, 128), has_bias=True)
        assert torch.equal(weight, self._weight(dtype, (64, 128))), "convert changed the weight"
        assert torch.equal(weight, again)
        assert torch.equal(bias, bias_again), "convert changed the bias"
        assert torch.equal(first.decoded(), second.decoded()), "two conversions of the same weight differ"

    def _dtypes(self) -> list[torch.dtype]:
        return [getattr(torch, name) for name in self.dtypes]

    def _weight(self, dtype: torch.dtype, size: tuple[int, int]) -> Tensor:
        return (self._draw(*size, seed=1) * 0.05).to(dtype)

    def _draw(self, *size: int, seed: int) -> Tensor:
        values = torch.randn(*size, generator=torch.Generator().manual_seed(seed))
        return values.to(self.device)
