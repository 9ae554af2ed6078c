"""The grouped linear layer, which multiplies each expert's matrix with the rows that are routed to that expert.

On a CPU, and with quantized weights, there is one matrix product per expert with rows. Experts without rows cost
nothing, and the Python overhead does not depend on the number of rows. On a CUDA device, one operation computes all
experts. Its bfloat16 kernel reads the ends of the groups on the device, so the host does not synchronise with the
device.
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

#: The grouped kernel needs rows whose size in bytes is a multiple of this number.
_ALIGNMENT_BYTES = 16


@dataclass(frozen=True, slots=True)
class RowGroups:
    """The rows of each expert. Rows are sorted by expert.

    Attributes:
        expert_ids: int64 [N], ascending.
        ends: int32 [E], index after each expert's last row.
    """

    expert_ids: Tensor
    ends: Tensor

    @classmethod
    def of(cls, expert_ids: Tensor, num_experts: int) -> "RowGroups":
        """Return the groups of ascending ids, int64 [N], without synchronising with the device."""
        experts = torch.arange(num_experts, device=expert_ids.device)
        return cls(expert_ids, torch.searchsorted(expert_ids, experts, right=True, out_int32=True))

    def on_host(self) -> Iterator[tuple[int, slice]]:
        """Yield each expert that has rows, and its rows. Synchronises with the device."""
        start = 0
        for expert, end in enumerate(self.ends.tolist()):
            if end > start:
                yield expert, slice(start, end)
            start = end


class GroupedLinear(nn.Module):
    """A linear layer with one matrix per expert; see `Linear`.

    Args:
        num_experts: E.
        in_features, out_features: sizes of each matrix.
        parts: names in the checkpoint of each matrix's projections, in the order of the output; read by quantizations.
        bias: whether each expert has a bias.
        device, dtype: device and dtype of the parameters.

    Attributes:
        weight: [E, out, in]; [0, out, in] while the experts' matrices are packed or quantized, each separately.
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
        """Map [N, in], N > 0, to [N, out], each row with its expert's matrix."""
        if self._fits_one_kernel():
            return grouped_product(x, self.weight, self.bias, groups)
        return torch.cat([self._product(expert, x[rows]) for expert, rows in groups.on_host()])

    def use_ops(self, ops: LayerOps) -> None:
        """Set the operations that pack the weights."""
        self.ops = ops

    @property
    def kernels(self) -> list[LinearKernel]:
        """The quantized matrices, one per expert; empty while weights are not quantized."""
        return self._kernels

    @property
    def num_weights(self) -> int:
        """Number of elements of the weight, quantized or not."""
        return self.num_experts * self.out_features * self.in_features

    def describe(self, name: str) -> LinearLayer:
        """Return the description of each expert's layer for a quantization; `name` is the layer's path in the model."""
        return LinearLayer(name, self._parts, self.in_features, self.out_features)

    def quantize_with(self, quantization: Quantization | None) -> None:
        """Set the quantization that converts the weights after each loading; None: weights are not quantized."""
        self._quantization = quantization

    def pack(self) -> None:
        """Quantize the loaded weights, or pack them for this CPU; `unpack` reverses it.

        Effects: while this method runs, a second copy of this layer's weights is allocated.
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
        """Restore the plain weights if they were packed; leave them uninitialised if they were quantized."""
        if self._packed:
            plain = torch.stack([packed.plain() for packed in self._packed])
            self.weight, self._packed = nn.Parameter(plain, requires_grad=False), []
        elif self._kernels:
            self.weight, self._kernels = self._empty_weight(self.num_experts), []

    def discard(self) -> None:
        """Free the packed or quantized weights; the plain weights are then uninitialised until the next loading."""
        if self._packed or self._kernels:
            self._packed, self._kernels = [], []
            self.weight = self._empty_weight(self.num_experts)

    def _fits_one_kernel(self) -> bool:
        """Return whether the device's grouped kernel can read the weights."""
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
    """Multiply each row by its expert's matrix in one operation, without synchronising with the device.

    Args:
        x: [N, in].
        weight: [E, out, in]; a row of either size is a multiple of 16 bytes.
        bias: [E, out], or None.
        groups: groups of the rows.

    Returns: [N, out].
    """
    out = F.grouped_mm(x, weight.transpose(1, 2), offs=groups.ends)
    return out if bias is None else out + bias[groups.expert_ids]
