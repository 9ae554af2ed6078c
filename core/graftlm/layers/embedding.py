"""The token embedding, which may also be the output projection."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from graftlm.layers.ops import LayerOps, TorchOps
from graftlm.layers.packing import PackedMatrix, linear
from graftlm.layers.weights import WeightSlot, empty_parameter

__all__ = ["TokenEmbedding"]


class TokenEmbedding(nn.Module):
    """A matrix with one row per token of the vocabulary.

    Args:
        vocab_size: V.
        hidden_size: size of a row.
        device, dtype: device and dtype of the weight.
    """

    def __init__(self, vocab_size: int, hidden_size: int, *, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = empty_parameter(vocab_size, hidden_size, device=device, dtype=dtype)
        self._packed: PackedMatrix | None = None
        self.ops: LayerOps = TorchOps()

    def use_ops(self, ops: LayerOps) -> None:
        """Set the operations that pack the weight for `logits`."""
        self.ops = ops

    def forward(self, token_ids: Tensor) -> Tensor:
        """Look up token ids, int64 [T]; return [T, hidden]."""
        return F.embedding(token_ids, self.weight)

    def logits(self, hidden: Tensor) -> Tensor:
        """Map [S, hidden] to [S, V] with the embedding matrix, as the output projection of a tied model."""
        return linear(hidden, self.weight, self._packed)

    def pack_output(self) -> None:
        """Pack the loaded weight for `logits` of a tied model on a CPU.

        Effects: allocates a second copy, because look-ups read the plain weight. Loading again discards it.
        """
        self._packed = self.ops.pack(self.weight)

    def discard(self) -> None:
        """Free the packed copy."""
        self._packed = None

    def weight_slots(self, prefix: str, name: str) -> Iterator[WeightSlot]:
        """Yield the slot of `{prefix}{name}.weight`."""
        self._packed = None
        yield WeightSlot(f"{prefix}{name}.weight", self.weight)
