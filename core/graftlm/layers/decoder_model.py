"""The base class of decoder models, which implements the model contract except for the forward pass."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

from torch import Tensor, nn

from graftlm.contracts import AttentionBackend, AttentionLayer, ForwardBatch, Model, ModelContext, StateLayer
from graftlm.layers.attention import Attention
from graftlm.layers.decoder_shape import DecoderShape, VocabularyShape
from graftlm.layers.embedding import TokenEmbedding, gather_logits
from graftlm.layers.linear import Linear, pack_linears
from graftlm.layers.norm import GemmaRMSNorm, RMSNorm
from graftlm.layers.recurrent import RecurrentState
from graftlm.layers.weights import WeightSlot, copy_weights, read_weight

__all__ = ["DecoderLayer", "DecoderModel"]


class DecoderLayer(nn.Module, ABC):
    """One layer of a `DecoderModel`: a module that yields the names of its tensors in the checkpoint."""

    @abstractmethod
    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        """Yield the slots of all tensors of the layer.

        Args:
            prefix: prefix of the tensors' names in the checkpoint, such as "model.layers.0.".
        """


class DecoderModel(nn.Module, Model):
    """A token embedding, layers, a final norm and an output projection, with the names of Llama checkpoints.

    This class binds attention, and loads, updates, reads and packs weights. A subclass adds `forward`.

    Args:
        shape: shape of the decoder. If `shape.tied`, the token embedding is also the output projection.
        context: the device and the dtype of the parameters.
        layers: layers in the order of the forward pass. Each attends through `graftlm.layers.Attention`, or stores its
            state in a `graftlm.layers.RecurrentState`. The first two arguments of a layer, and of `norm`, are x and the
            residual stream without x, which may be None.
        norm: the final norm.
        norm_name: name of the final norm in the checkpoint, without the prefix "model.".

    Attributes:
        embed: token embedding, "model.embed_tokens" in the checkpoint.
        layers: the layers, "model.layers.0", "model.layers.1" and so on in the checkpoint.
        norm: the final norm, "model.{norm_name}" in the checkpoint.
        lm_head: output projection, "lm_head" in the checkpoint; None if the token embedding replaces it.
    """

    def __init__(
        self,
        shape: DecoderShape | VocabularyShape,
        context: ModelContext,
        layers: Iterable[DecoderLayer],
        norm: RMSNorm | GemmaRMSNorm,
        norm_name: str = "norm",
    ) -> None:
        super().__init__()
        device, dtype = context.device, context.dtype
        self._vocab = context.parallel.padded(shape.vocab_size)
        vocab = {"lm_head": self._vocab}
        self.embed = TokenEmbedding(self._vocab, shape.hidden_size, device=device, dtype=dtype)
        self.layers = nn.ModuleList(layers)
        self.norm = norm
        self._norm_name = norm_name
        self.lm_head = None if shape.tied else Linear(shape.hidden_size, vocab, device=device, dtype=dtype)

    @property
    def attention_layers(self) -> Sequence[AttentionLayer]:
        """The attention layers, in the order of `layers`."""
        return [attention.spec for attention in self._attentions()]

    def bind_attention(self, backend: AttentionBackend) -> None:
        """Set the backend of every attention layer."""
        for attention in self._attentions():
            attention.bind(backend)

    @property
    def state_layers(self) -> Sequence[StateLayer]:
        """The layers with a recurrent state, in the order of `layers`."""
        return [state.spec for state in self._states()]

    def bind_states(self, states: Sequence[Sequence[Tensor]]) -> None:
        """Set the tensors of every layer with a recurrent state."""
        for state, tensors in zip(self._states(), states, strict=True):
            state.bind(tensors)

    def embedded(self, batch: ForwardBatch) -> Tensor:
        """Return the embeddings of a batch's tokens, [T, hidden], with features of pictures in place of some."""
        x = self.embed_tokens(batch.input_ids)
        if batch.features is None or batch.feature_idx is None:
            return x
        return x.index_copy(0, batch.feature_idx, batch.features.to(x.dtype))

    def logits(self, hidden: Tensor) -> Tensor:
        """Map [S, hidden] to [S, V], in the parameters' dtype."""
        if self.lm_head is None:
            return self.embed.logits(hidden)
        return gather_logits(self.lm_head.forward(hidden), self._vocab)

    @property
    def captures_inputs(self) -> bool:
        """Always true."""
        return True

    def forward_with_inputs(self, batch: ForwardBatch, layers: Sequence[int]) -> tuple[Tensor, list[Tensor]]:
        """Return `forward(batch)`, and the inputs of some layers; see `Model`."""
        found: dict[int, Tensor] = {}
        modules = [*self.layers, self.norm]
        hooks = [modules[i].register_forward_pre_hook(_store_input(found, i)) for i in set(layers)]
        try:
            hidden = self.forward(batch)
        finally:
            for hook in hooks:
                hook.remove()
        return hidden, [found[i] for i in layers]

    def embed_tokens(self, token_ids: Tensor) -> Tensor:
        """Map token ids, int64 [T], to [T, hidden]; see `Model`. A model that scales embeddings overrides this."""
        embedded: Tensor = self.embed(token_ids)
        return embedded

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copy a Hugging Face checkpoint to the parameters; see `Model`."""
        copy_weights(self.weight_slots(), self.convert_weights(weights), self._aliases)

    def update_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copy some tensors to the parameters; see `Model`."""
        copy_weights(self.weight_slots(), self.convert_weights(weights), self._aliases, partial=True)

    def read_weight(self, name: str) -> Tensor:
        """Return a copy of one weight; see `Model`."""
        return read_weight(self.weight_slots(), name, self._aliases)

    def pack_weights(self) -> None:
        """Rearrange every matrix for this CPU; see `Model`."""
        pack_linears(self)
        if self.lm_head is None:
            self.embed.pack_output()

    def convert_weights(self, weights: Iterable[tuple[str, Tensor]]) -> Iterable[tuple[str, Tensor]]:
        """Convert a checkpoint's (name, tensor) pairs to the form of `weight_slots`; by default, change nothing.

        `load_weights` and `update_weights` call this method. A subclass overrides it to drop, rename or decode tensors.
        """
        return weights

    def weight_slots(self) -> Iterator[WeightSlot]:
        """Yield the slots of all tensors of the model."""
        yield from self.embed.weight_slots("model.", "embed_tokens")
        for i, layer in enumerate(self.layers):
            yield from cast(DecoderLayer, layer).weight_slots(f"model.layers.{i}.")
        yield from self.norm.weight_slots("model.", self._norm_name)
        if self.lm_head is not None:
            yield from self.lm_head.weight_slots("")

    @property
    def _aliases(self) -> Mapping[str, str]:
        return {"lm_head.weight": "model.embed_tokens.weight"} if self.lm_head is None else {}

    def _attentions(self) -> Iterator[Attention]:
        return (module for module in self.layers.modules() if isinstance(module, Attention))

    def _states(self) -> Iterator[RecurrentState]:
        return (module for module in self.layers.modules() if isinstance(module, RecurrentState))


def _store_input(found: dict[int, Tensor], i: int) -> Callable[[nn.Module, tuple[Any, ...]], None]:
    """Return a hook that stores the residual stream before a layer or norm: x plus the stream without x, if any."""

    def store(module: nn.Module, arguments: tuple[Any, ...]) -> None:
        x, residual = arguments[:2]
        found[i] = x if residual is None else residual + x

    return store
