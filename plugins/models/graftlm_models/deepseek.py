"""DeepSeek V2 (arXiv:2405.04434) and V3 (arXiv:2412.19437)."""

import re
from collections.abc import Iterable, Iterator

from torch import Tensor

from graftlm.contracts import DraftHead, DraftHeadContext, ForwardBatch, ModelContext
from graftlm.layers import DecoderModel, DecoderShape, RMSNorm, RotaryEmbedding, rope_frequencies
from graftlm_models.deepseek_layer import DeepseekLayer, LatentShape, read_count
from graftlm_models.deepseek_mtp import DeepseekMtpHead

__all__ = ["DeepseekForCausalLM"]

#: Prefix of the names of a layer's tensors.
_LAYER = re.compile(r"model\.layers\.([0-9]{1,9})\.")


class DeepseekForCausalLM(DecoderModel):
    """Maps tokens to logits."""

    def __init__(self, context: ModelContext) -> None:
        latent = LatentShape.from_config(context.config)
        shape = DecoderShape.from_config(context.config, context.parallel, head_dim=latent.rope_dim)
        device, dtype = context.device, context.dtype
        layers = (DeepseekLayer(shape, latent, context, layer_id) for layer_id in range(shape.num_layers))
        norm = RMSNorm(shape.hidden_size, shape.eps, device=device, dtype=dtype)
        super().__init__(shape, context, layers, norm)
        self._num_draft_layers = read_count(context.config.raw, "num_nextn_predict_layers", default=0)
        frequencies = rope_frequencies(context.config, latent.rope_dim, context_len=context.context_len)
        self.rotary = RotaryEmbedding(frequencies, device=device, dtype=dtype)

    @property
    def selects_tokens(self) -> bool:
        """Always true: the last layer's feed-forward runs only for the tokens of `wanted_idx`."""
        return True

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Return final hidden states, [T, hidden] or [W, hidden]; see the contract."""
        rotation = self.rotary(batch.positions)
        x, residual = self.embed(batch.input_ids), None
        for layer in self.layers[:-1]:
            x, residual = layer(x, residual, rotation)
        x, residual = self.layers[-1](x, residual, rotation, batch.wanted_idx)
        hidden: Tensor = self.norm(x, residual)[0]
        return hidden

    def draft_head(self, context: DraftHeadContext) -> DraftHead:
        """Return the MTP layer; see `Model`."""
        return DeepseekMtpHead(context)

    def convert_weights(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Drop the tensors of draft layers, which follow the last served layer."""
        return ((name, tensor) for name, tensor in weights if not self._is_draft(name))

    def _is_draft(self, name: str) -> bool:
        """Return whether a tensor belongs to a draft layer."""
        layer = _LAYER.match(name)
        return layer is not None and 0 <= int(layer[1]) - len(self.layers) < self._num_draft_layers
