"""The token embedding, which may also be the output projection."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from graftlm.contracts import Shard
from graftlm.layers.linear import as_shard
from graftlm.layers.ops import LayerOps, TorchOps
from graftlm.layers.packing import PackedMatrix, linear
from graftlm.layers.weights import WeightSlot, cuts, empty_parameter

__all__ = ["TokenEmbedding", "gather_logits"]


class TokenEmbedding(nn.Module):
    """A matrix with one row per token of the vocabulary.

    If several ranks split the vocabulary, each rank looks up its tokens, and the rows of all ranks are added up.

    Args:
        vocab_size: V, or the rank's part of it.
        hidden_size: size of a row.
        device, dtype: device and dtype of the weight.
    """

    def __init__(self, vocab_size: int | Shard, hidden_size: int, *, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self._vocab = as_shard(vocab_size)
        self.weight = empty_parameter(self._vocab.length, hidden_size, device=device, dtype=dtype)
        self._packed: PackedMatrix | None = None
        self.ops: LayerOps = TorchOps()

    def use_ops(self, ops: LayerOps) -> None:
        """Set the operations that pack the weight for `logits`."""
        self.ops = ops

    def forward(self, token_ids: Tensor) -> Tensor:
        """Look up token ids, int64 [T]; return [T, hidden]."""
        communicator = self._vocab.communicator
        if communicator is None:
            return F.embedding(token_ids, self.weight)
        local = token_ids - self._vocab.start
        is_other = (local < 0) | (local >= self._vocab.num_used)
        found = F.embedding(local.masked_fill_(is_other, 0), self.weight)
        return communicator.all_reduce(found.masked_fill_(is_other.unsqueeze(-1), 0))

    def logits(self, hidden: Tensor) -> Tensor:
        """Map [S, hidden] to [S, V] with the embedding matrix, as the output projection of a tied model."""
        return gather_logits(linear(hidden, self.weight, self._packed), self._vocab)

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
        used = self._vocab.num_used
        yield WeightSlot(f"{prefix}{name}.weight", self.weight[:used], shards=cuts(self._vocab))
        self.weight.data[used:].zero_()  # padding


def gather_logits(logits: Tensor, vocab: Shard) -> Tensor:
    """Return the logits of the whole vocabulary, [S, V], from each rank's logits, [S, vocab.length]."""
    if vocab.communicator is None:
        return logits
    parts = vocab.communicator.all_gather(logits)  # [ranks, S, vocab.length]
    return parts.transpose(0, 1).reshape(len(logits), -1)[:, : vocab.size].contiguous()
