"""Mamba 2 (arXiv:2405.21060): layers with a state space, without attention and feed-forward layers."""

from collections.abc import Iterator, Mapping

from torch import Tensor

from graftlm.contracts import ForwardBatch, ModelConfig, ModelContext, StateBatch
from graftlm.layers import (
    DecoderLayer,
    DecoderModel,
    RMSNorm,
    VocabularyShape,
    WeightSlot,
    read_flag,
    read_number,
    read_size,
    required_state,
)
from graftlm_models.mamba_mixer import MambaMixer, MambaShape, check_silu, read_time_step_limit

__all__ = ["Mamba2ForCausalLM"]


class Mamba2ForCausalLM(DecoderModel):
    """Maps tokens to logits."""

    def __init__(self, context: ModelContext) -> None:
        config, device, dtype = context.config, context.device, context.dtype
        shape = _mamba_shape(config)
        layers = (Mamba2Layer(shape, context, i) for i in range(read_size(config.raw, "num_hidden_layers")))
        norm = RMSNorm(shape.hidden_size, shape.eps, device=device, dtype=dtype)
        tied = read_flag(config.raw, "tie_word_embeddings")
        super().__init__(VocabularyShape(config.vocab_size, shape.hidden_size, tied), context, layers, norm)

    @property
    def repeats_calls(self) -> bool:
        """Always true."""
        return True

    @property
    def selects_tokens(self) -> bool:
        """Always true: the last layer's output projection runs only for the tokens of `wanted_idx`."""
        return True

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Return final hidden states, [T, hidden] or [W, hidden]; see the contract."""
        state = required_state(batch.state)
        x, residual = self.embed(batch.input_ids), None
        for layer in self.layers[:-1]:
            x, residual = layer(x, residual, state)
        x, residual = self.layers[-1](x, residual, state, batch.wanted_idx)
        hidden: Tensor = self.norm(x, residual)[0]
        return hidden

    def weight_slots(self) -> Iterator[WeightSlot]:
        """Yield the slots of all tensors of the model."""
        yield from self.embed.weight_slots("backbone.", "embeddings")
        for i, layer in enumerate(self.layers):
            assert isinstance(layer, Mamba2Layer)
            yield from layer.weight_slots(f"backbone.layers.{i}.")
        yield from self.norm.weight_slots("backbone.", "norm_f")
        if self.lm_head is not None:
            yield from self.lm_head.weight_slots("")

    @property
    def _aliases(self) -> Mapping[str, str]:
        return {"lm_head.weight": "backbone.embeddings.weight"} if self.lm_head is None else {}


class Mamba2Layer(DecoderLayer):
    """A layer: the mixer after a norm, added to the residual stream."""

    def __init__(self, shape: MambaShape, context: ModelContext, layer_id: int) -> None:
        super().__init__()
        device, dtype = context.device, context.dtype
        self.norm = RMSNorm(shape.hidden_size, shape.eps, device=device, dtype=dtype)
        self.mixer = MambaMixer(shape, layer_id, device=device, dtype=dtype)

    def forward(
        self, x: Tensor, residual: Tensor | None, state: StateBatch, wanted_idx: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return this layer's addition to the residual stream, and the stream without it; both [T, hidden].

        Args:
            wanted_idx: the tokens to return, int64 [W]; None: all.
        """
        x, residual = self.norm(x, residual)
        return self.mixer(x, state, wanted_idx), (
            residual if wanted_idx is None else residual.index_select(0, wanted_idx)
        )

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        """Yield the slots of the `{prefix}...` tensors."""
        yield from self.norm.weight_slots(prefix, "norm")
        yield from self.mixer.weight_slots(f"{prefix}mixer.")


def _mamba_shape(config: ModelConfig) -> MambaShape:
    """Read the sizes of the mixers.

    Raises:
        CheckpointError: a size is missing or wrong.
        UnsupportedArchitectureError: the activation is not SiLU.
    """
    raw = config.raw
    check_silu(raw)
    return MambaShape(
        hidden_size=read_size(raw, "hidden_size"),
        num_heads=read_size(raw, "num_heads"),
        head_dim=read_size(raw, "head_dim"),
        state_size=read_size(raw, "state_size"),
        num_groups=read_size(raw, "n_groups", default=8),
        kernel_size=read_size(raw, "conv_kernel", default=4),
        conv_bias=read_flag(raw, "use_conv_bias", default=True),
        proj_bias=read_flag(raw, "use_bias"),
        eps=read_number(raw, "layer_norm_epsilon", default=1e-5),
        time_step_limit=read_time_step_limit(raw),
    )
