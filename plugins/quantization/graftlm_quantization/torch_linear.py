"""A quantized layer with PyTorch's operations. It decodes one panel of weights at a time, and is slow but portable."""

import torch
import torch.nn.functional as F
from torch import Tensor

from graftlm.contracts import LinearKernel
from graftlm_quantization.coded_matrix import CodedMatrix

__all__ = ["TorchLinear"]

_PANEL_BLOCKS = 32


class TorchLinear(LinearKernel):
    """Multiplies with weights that it decodes to the activations' dtype.

    Args:
        matrix: [N, K].
        bias: float32 [N], or None.
    """

    def __init__(self, matrix: CodedMatrix, bias: Tensor | None) -> None:
        self._matrix = matrix
        self._bias = bias

    @property
    def num_bytes(self) -> int:
        """Size of codes and scales in bytes."""
        return self._matrix.num_bytes

    def __call__(self, x: Tensor) -> Tensor:
        """Map [..., K] to [..., N]."""
        blocks = self._matrix.num_blocks
        panels = [
            F.linear(x, self._matrix.decoded(first, min(first + _PANEL_BLOCKS, blocks)).to(x.dtype))
            for first in range(0, blocks, _PANEL_BLOCKS)
        ]
        out = torch.cat(panels, dim=-1)
        return out if self._bias is None else out.add_(self._bias)

    def decoded(self) -> Tensor:
        """Return the weights, float32 [N, K]."""
        return self._matrix.decoded(0, self._matrix.num_blocks)
