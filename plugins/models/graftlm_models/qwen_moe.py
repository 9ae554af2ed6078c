"""The feed-forward layers of Qwen's mixtures of experts."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from graftlm.contracts import ModelContext
from graftlm.errors import CheckpointError
from graftlm.layers import (
    DecoderShape,
    Experts,
    GatedMLP,
    Linear,
    MoE,
    Router,
    WeightSlot,
    read_expert_counts,
    read_flag,
    read_size,
    softmax_top_k,
)

__all__ = ["QwenMoE"]


class QwenMoE(nn.Module):
    """A feed-forward layer of routed experts. In Qwen 2 it also has a shared expert, multiplied by a gate.

    Args:
        shape: sizes of the decoder.
        context: context of the model.
        has_shared_expert: whether there is a shared expert.

    Raises:
        CheckpointError: a size is missing, or the sizes are inconsistent.
    """

    def __init__(self, shape: DecoderShape, context: ModelContext, *, has_shared_expert: bool) -> None:
        super().__init__()
        raw, hidden_size, act = context.config.raw, shape.hidden_size, shape.hidden_act
        device, dtype = context.device, context.dtype
        num_experts, top_k = read_expert_counts(raw)
        choose = softmax_top_k(top_k, renormalise=read_flag(raw, "norm_topk_prob"))
        size = context.parallel.shard(read_size(raw, "moe_intermediate_size"), "moe_intermediate_size")
        self.moe = MoE(
            Router(hidden_size, num_experts, choose, device=device, dtype=dtype),
            Experts(num_experts, hidden_size, size, act, device=device, dtype=dtype),
        )
        self.shared = self.shared_gate = None
        if has_shared_expert:
            name = "shared_expert_intermediate_size"
            shared_size = context.parallel.shard(read_size(raw, name), name)
            self.shared = GatedMLP(hidden_size, shared_size, act, device=device, dtype=dtype)
            self.shared_gate = Linear(hidden_size, {"shared_expert_gate": 1}, device=device, dtype=dtype)

    @staticmethod
    def replaces_mlp(raw: Mapping[str, Any], layer_id: int) -> bool:
        """Return whether a layer has experts, according to `decoder_sparse_step` and `mlp_only_layers`.

        Raises:
            CheckpointError: an entry of config.json has a wrong type.
        """
        dense = raw.get("mlp_only_layers") or ()
        if not isinstance(dense, Sequence) or not all(isinstance(layer, int) for layer in dense):
            raise CheckpointError(f"config.json needs mlp_only_layers as a list of layers, got {dense!r}")
        return layer_id not in dense and (layer_id + 1) % read_size(raw, "decoder_sparse_step", default=1) == 0

    def forward(self, x: Tensor) -> Tensor:
        """Map [T, hidden] to [T, hidden]."""
        out: Tensor = self.moe(x)
        if self.shared is not None and self.shared_gate is not None:
            out = out + torch.sigmoid(self.shared_gate(x)) * self.shared(x)
        return out

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        """Yield the slots of the `{prefix}...` tensors."""
        yield from self.moe.router.weight_slots(prefix, "gate")
        yield from self.moe.experts.weight_slots(f"{prefix}experts.")
        if self.shared is not None and self.shared_gate is not None:
            yield from self.shared.weight_slots(f"{prefix}shared_expert.")
            yield from self.shared_gate.weight_slots(prefix)
