"""The grouped linear layer: one matrix per expert, each for the rows that were sent to it.

On a CPU, and with quantized weights, each expert that has rows is one matrix product: experts without rows cost
nothing, and the number of rows costs no Python. On a CUDA device all of them are one operation; its kernel for bfloat16
reads on the device where the groups end, so that nothing waits for the host.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from graftlm.contracts import LinearKernel, LinearLayer, Quantization
from graftlm.layers.ops import LayerOps, TorchOps
from graftlm.layers.packing import PackedMatrix
from graftlm.layers.weights import empty_parameter

__all__ = ["GroupedLinear", "RowGroups", "grouped_product"]

#: The grouped kernel reads rows by pieces of so many bytes.
_ALIGNMENT_BYTES = 16


@dataclass(frozen=True, slots=True)
class RowGroups:
    """Which expert each row goes to. Rows lie in the experts' order.

    Attributes:
        expert_ids: int64 [N], ascending.
        ends: int32 [E], the row after each expert's last.
    """

    expert_ids: Tensor
    ends: Tensor

    @classmethod
    def of(cls, expert_ids: Tensor, num_experts: int) -> "RowGroups":
        """Make the groups of int64 [N] ascending ids, without waiting for the device."""
        experts = torch.arange(num_experts, device=expert_ids.device)
        return cls(expert_ids, torch.searchsorted(expert_ids, experts, right=True, out_int32=True))

    def on_host(self) -> Iterator[tuple[int, slice]]:
        """Yield each expert that has rows, and its rows. Waits for the device."""
        start = 0
        for expert, end in enumerate(self.ends.tolist()):
            if end > start:
                yield expert, slice(start, end)
            start = end


class GroupedLinear(nn.Module):
    """Like `Linear`, with a matrix per expert.

    Args:
        num_experts: E.
        in_features, out_features: of each matrix.
        parts: checkpoint names of what a matrix computes, in the order of its output; a quantization asks for them.
        bias: whether each expert has one.
        device, dtype: of the parameters.

    Attributes:
        weight: [E, out, in]; [0, out, in] while the experts' matrices are packed or quantized, each by itself.
        bias: [E, out], or None.
    """

    def __init__(
        self,
        num_experts: int,
        in_features: int,
        out_features: int,
        parts: tuple[str, ...],
        *,
        bias: bool = False,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self._parts = parts
        self._quantization: Quantization | None = None
        self._kernels: list[LinearKernel] = []
        self._packed: list[PackedMatrix] = []
        self.ops: LayerOps = TorchOps()
        self.num_experts = num_experts
        self.in_features = in_features
        self.out_features = out_features
        self.weight = empty_parameter(num_experts, out_features, in_features, device=device, dtype=dtype)
        self.bias = empty_parameter(num_experts, out_features, device=device, dtype=dtype) if bias else None

    def forward(self, x: Tensor, groups: RowGroups) -> Tensor:
        """Map [N, in], N > 0, to [N, out], each row by its expert's matrix."""
        if self._fits_one_kernel():
            return grouped_product(x, self.weight, self.bias, groups)
        return torch.cat([self._product(expert, x[rows]) for expert, rows in groups.on_host()])

    def use_ops(self, ops: LayerOps) -> None:
        """Set the operations that pack the weights."""
        self.ops = ops

    @property
    def kernels(self) -> list[LinearKernel]:
        """What computes the layer while its weights are quantized, one per expert."""
        return self._kernels

    @property
    def num_weights(self) -> int:
        """Elements of the weight, quantized or not."""
        return self.num_experts * self.out_features * self.in_features

    def describe(self, name: str) -> LinearLayer:
        """Return what a quantization is asked about, of each expert; `name` is the layer's place in the model."""
        return LinearLayer(name, self._parts, self.in_features, self.out_features)

    def quantize_with(self, quantization: Quantization | None) -> None:
        """Set what converts the weights each time that they have been loaded; None leaves them as they are."""
        self._quantization = quantization

    def pack(self) -> None:
        """Quantize the loaded weights, or rearrange them for this CPU; `unpack` undoes it.

        Effects: takes memory for a second copy of this layer until it is done.
        """
        if self._kernels or self._packed:
            return
        if self._quantization is not None:
            self._kernels = [self._quantization.convert(self.weight[e], self._bias(e)) for e in range(self.num_experts)]
        else:
            self._packed = [packed for packed in map(self.ops.pack, self.weight) if packed is not None]
            if not self._packed:
                return
        self.weight = self._empty_weight(num_experts=0)

    def unpack(self) -> None:
        """Make the plain weights again if they were packed; uninitialised if they were quantized, to be loaded anew."""
        if self._packed:
            plain = torch.stack([packed.plain() for packed in self._packed])
            self.weight, self._packed = nn.Parameter(plain, requires_grad=False), []
        elif self._kernels:
            self.weight, self._kernels = self._empty_weight(self.num_experts), []

    def _fits_one_kernel(self) -> bool:
        """Whether the device's grouped kernel can read the weights."""
        if not self.weight.is_cuda or self._kernels:
            return False
        row_bytes = (size * self.weight.dtype.itemsize for size in (self.in_features, self.out_features))
        return all(size % _ALIGNMENT_BYTES == 0 for size in row_bytes)

    def _product(self, expert: int, x: Tensor) -> Tensor:
        if self._kernels:
            return self._kernels[expert](x)
        if self._packed:
            return self._packed[expert](x, self._bias(expert))
        return F.linear(x, self.weight[expert], self._bias(expert))

    def _bias(self, expert: int) -> Tensor | None:
        return None if self.bias is None else self.bias[expert]

    def _empty_weight(self, num_experts: int) -> nn.Parameter:
        shape = (num_experts, self.out_features, self.in_features)
        return empty_parameter(*shape, device=self.weight.device, dtype=self.weight.dtype)


def grouped_product(x: Tensor, weight: Tensor, bias: Tensor | None, groups: RowGroups) -> Tensor:
    """Multiply each row by its expert's matrix in one operation, which finds the groups' ends where they are.

    Args:
        x: [N, in].
        weight: [E, out, in]; a row of either size is a multiple of 16 bytes.
        bias: [E, out], or None.
        groups: of the rows.

    Returns: [N, out].
    """
    out = F.grouped_mm(x, weight.transpose(1, 2), offs=groups.ends)
    return out if bias is None else out + bias[groups.expert_ids]
