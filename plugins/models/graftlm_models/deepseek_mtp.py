"""The multi-token-prediction (MTP) layer of DeepSeek V3 (arXiv:2412.19437), which follows the last served layer.

    final hidden state         hnorm     |
    token after the position   enorm     |  concatenated   eh_proj   decoder layer   shared_head.norm   output

The output is projected to logits by the served model's output projection, and is the feature of the next position.
"""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from graftlm.contracts import AttentionBackend, AttentionLayer, DraftHead, DraftHeadContext
from graftlm.errors import UnsupportedArchitectureError
from graftlm.layers import (
    DecoderShape,
    Linear,
    RMSNorm,
    RotaryEmbedding,
    WeightSlot,
    copy_weights,
    pack_linears,
    rope_frequencies,
)
from graftlm_models.deepseek_layer import DeepseekLayer, LatentShape

__all__ = ["DeepseekMtpHead"]

#: Tensors of the layer that equal those of the served model, which are used instead.
_SHARED = ("embed_tokens.weight", "shared_head.head.weight")


class DeepseekMtpHead(nn.Module, DraftHead):
    """The first MTP layer of a checkpoint. For further tokens of a draft, it reads its own output.

    Args:
        context: the served model, and the device and the dtype of the parameters.

    Raises:
        UnsupportedArchitectureError: the checkpoint has no MTP layer.
    """

    def __init__(self, context: DraftHeadContext) -> None:
        super().__init__()
        served, raw = context.served, context.served.config.raw
        device, dtype = served.device, served.dtype
        if not raw.get("num_nextn_predict_layers"):
            raise UnsupportedArchitectureError("config.json has no num_nextn_predict_layers: there is no MTP layer")
        latent = LatentShape.from_config(served.config)
        shape = DecoderShape.from_config(served.config, served.parallel, head_dim=latent.rope_dim)
        size = shape.hidden_size
        self._model = [context.model]  # in a list, so that the served model is not a submodule
        self._size = size
        self._prefix = f"model.layers.{shape.num_layers}."
        self.enorm = RMSNorm(size, shape.eps, device=device, dtype=dtype)
        self.hnorm = RMSNorm(size, shape.eps, device=device, dtype=dtype)
        self.eh_proj = Linear(2 * size, {"eh_proj": size}, device=device, dtype=dtype)
        self.layer = DeepseekLayer(shape, latent, served, context.layer_id)
        self.norm = RMSNorm(size, shape.eps, device=device, dtype=dtype)
        frequencies = rope_frequencies(served.config, latent.rope_dim, context_len=served.context_len)
        self.rotary = RotaryEmbedding(frequencies, device=device, dtype=dtype)

    @property
    def attention_layer(self) -> AttentionLayer:
        """The latent attention of the layer."""
        return self.layer.attention.attend.spec

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        """No layers: only the final hidden states are read."""
        return ()

    @property
    def feature_size(self) -> int:
        """Size of the hidden states."""
        return self._size

    @property
    def weight_prefix(self) -> str:
        """The prefix of the layer after the last served one."""
        return self._prefix

    def bind_attention(self, backend: AttentionBackend) -> None:
        """Set the backend."""
        self.layer.attention.attend.bind(backend)

    def features(self, hidden: Tensor) -> Tensor:
        """Return the final hidden states."""
        return hidden

    def keys_and_values(self, features: Tensor, token_ids: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values; see `DraftHead`."""
        x = self.layer.input_norm(self._fused(features, token_ids))[0]
        return self.layer.attention.keys_and_values(x, self.rotary(positions))

    def forward(self, features: Tensor, token_ids: Tensor, positions: Tensor) -> Tensor:
        """Return the features of the next positions; see `DraftHead`."""
        x, residual = self.layer(self._fused(features, token_ids), None, self.rotary(positions))
        following: Tensor = self.norm(x, residual)[0]
        return following

    def logits(self, features: Tensor) -> Tensor:
        """Map features to logits with the served model's output projection."""
        return self._model[0].logits(features)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copy the tensors of the layer; see `DraftHead`."""
        own = ((name, tensor) for name, tensor in weights if name.startswith(self._prefix))
        copy_weights(
            self._weight_slots(), ((name, t) for name, t in own if name.removeprefix(self._prefix) not in _SHARED)
        )

    def pack_weights(self) -> None:
        """Rearrange every matrix for this CPU."""
        pack_linears(self)

    def _fused(self, features: Tensor, token_ids: Tensor) -> Tensor:
        embedded = self.enorm(self._model[0].embed_tokens(token_ids))[0]
        fused: Tensor = self.eh_proj(torch.cat([embedded, self.hnorm(features)[0]], dim=-1))
        return fused

    def _weight_slots(self) -> Iterator[WeightSlot]:
        yield from self.enorm.weight_slots(self._prefix, "enorm")
        yield from self.hnorm.weight_slots(self._prefix, "hnorm")
        yield from self.eh_proj.weight_slots(self._prefix)
        yield from self.layer.weight_slots(self._prefix)
        yield from self.norm.weight_slots(f"{self._prefix}shared_head.", "norm")
