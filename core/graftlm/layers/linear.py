"""The linear layer: one matrix that may hold several of a checkpoint's projections."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from graftlm.layers.packing import linear, pack
from graftlm.layers.weights import WeightSlot, empty_parameter

__all__ = ["Linear", "pack_linears"]


class Linear(nn.Module):
    """Projections of the same input, computed as one matrix product.

    Args:
        in_features: size of the input.
        parts: checkpoint name -> output size of each projection, in the order of the output:
            `{"q_proj": 64, "k_proj": 16, "v_proj": 16}` gives outputs of 96.
        bias: whether each projection has one.
        device, dtype: of the parameters.
    """

    def __init__(
        self,
        in_features: int,
        parts: Mapping[str, int],
        *,
        bias: bool = False,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self._parts = dict(parts)
        out_features = sum(self._parts.values())
        self.weight = empty_parameter(out_features, in_features, device=device, dtype=dtype)
        self.bias = empty_parameter(out_features, device=device, dtype=dtype) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., in_features] to [..., sum of the parts]."""
        return linear(x, self.weight, self.bias)

    def pack(self) -> None:
        """Rearrange the loaded weights for this CPU; loading again undoes it."""
        self.weight = pack(self.weight)

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        """Yield where `{prefix}{part}.weight` and `.bias` go, for each part."""
        if self.weight.is_mkldnn:
            self.weight = empty_parameter(*self.weight.shape, device=self.weight.device, dtype=self.weight.dtype)
        start = 0
        for name, size in self._parts.items():
            rows = slice(start, start + size)
            yield WeightSlot(f"{prefix}{name}.weight", self.weight[rows])
            if self.bias is not None:
                yield WeightSlot(f"{prefix}{name}.bias", self.bias[rows])
            start += size


def pack_linears(model: nn.Module) -> None:
    """Rearrange the loaded weights of every `Linear` of a model for this CPU, one after the other."""
    for module in model.modules():
        if isinstance(module, Linear):
            module.pack()
