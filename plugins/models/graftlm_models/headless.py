"""This package's decoders without output projection: they return embeddings, or have a score head.

One wrapper serves all families. It creates the family's language model with tied weights, so that there is no output
projection. The wrapper itself loads the checkpoint's `score`.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

import torch.nn.functional as F
from torch import Tensor, nn

from graftlm.contracts import AttentionBackend, AttentionLayer, ForwardBatch, Model, ModelContext
from graftlm.errors import InvariantError
from graftlm.layers import (
    WeightSlot,
    copy_weights,
    empty_parameter,
    pack_linears,
    read_size,
    read_weight,
)

__all__ = ["HeadlessModel", "ScoreHead", "create_headless"]


class ScoreHead(nn.Module):
    """The score head: maps a text's last hidden state to one number per label.

    Its name in the checkpoint is `score`. It is never quantized.
    """

    def __init__(self, hidden_size: int, num_labels: int, context: ModelContext) -> None:
        super().__init__()
        self.weight = empty_parameter(num_labels, hidden_size, device=context.device, dtype=context.dtype)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map [S, hidden] to [S, num_labels]."""
        return F.linear(hidden, self.weight)

    def weight_slots(self) -> Iterator[WeightSlot]:
        """Yield the slot of `score.weight`."""
        yield WeightSlot("score.weight", self.weight)


class HeadlessModel(nn.Module, Model):
    """Maps tokens to hidden states, and hidden states to scores if there is a head.

    Args:
        decoder: the family's language model, without an output projection of its own.
        head: the score head; None: the model returns only hidden states.
    """

    def __init__(self, decoder: Model, head: ScoreHead | None) -> None:
        super().__init__()
        self.decoder = decoder
        self.head = head

    @property
    def attention_layers(self) -> Sequence[AttentionLayer]:
        """The attention layers of the decoder."""
        return self.decoder.attention_layers

    @property
    def num_labels(self) -> int | None:
        """Number of rows of the head; None if there is no head."""
        return None if self.head is None else self.head.weight.shape[0]

    @property
    def generates(self) -> bool:
        """Always false: the checkpoint was not trained to generate."""
        return False

    @property
    def repeats_calls(self) -> bool:
        """Whether the decoder repeats calls."""
        return self.decoder.repeats_calls

    def bind_attention(self, backend: AttentionBackend) -> None:
        """Set the backend of every attention layer."""
        self.decoder.bind_attention(backend)

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Return final hidden states, [T, hidden]."""
        hidden: Tensor = self.decoder.forward(batch)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the products of [S, hidden] and the token embeddings, [S, V]. They are not trained as logits."""
        return self.decoder.logits(hidden)

    def score(self, hidden: Tensor) -> Tensor:
        """Map [S, hidden] to [S, num_labels].

        Raises:
            InvariantError: the model has no score head.
        """
        if self.head is None:
            raise InvariantError("this model has no score head")
        scores: Tensor = self.head(hidden)
        return scores

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copy the weights of a Hugging Face checkpoint; see the contract."""
        kept: list[tuple[str, Tensor]] = []
        self.decoder.load_weights(self._without_head(weights, kept))
        copy_weights(self._head_slots(), kept)

    def update_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copy some weights; see the contract."""
        kept: list[tuple[str, Tensor]] = []
        self.decoder.update_weights(self._without_head(weights, kept))
        copy_weights(self._head_slots(), kept, partial=True)

    def read_weight(self, name: str) -> Tensor:
        """Return a copy of one weight; see the contract."""
        if self.head is not None and name.startswith("score."):
            return read_weight(self._head_slots(), name)
        return self.decoder.read_weight(name)

    def pack_weights(self) -> None:
        """Pack the decoder's matrices for this CPU, except the embedding, because logits are not computed."""
        pack_linears(self)

    def _head_slots(self) -> Iterator[WeightSlot]:
        return iter(()) if self.head is None else self.head.weight_slots()

    def _without_head(
        self, weights: Iterable[tuple[str, Tensor]], kept: list[tuple[str, Tensor]]
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the decoder's tensors, and append the head's tensors, which are small, to `kept`."""
        for name, tensor in weights:
            if self.head is not None and name.startswith("score."):
                kept.append((name, tensor))
            else:
                yield name, tensor


def create_headless(
    architecture: str, create: Callable[[ModelContext], Model], context: ModelContext, *, has_head: bool
) -> HeadlessModel:
    """Wrap a family's language model.

    Args:
        architecture: class name of the language model, such as "LlamaForCausalLM".
        create: creates the language model.
        context: context of the checkpoint, whose config.json names another class.
        has_head: whether the checkpoint has a `score` head.
    """
    config = context.config
    raw = {**config.raw, "architectures": [architecture], "tie_word_embeddings": True}
    decoder = create(replace(context, config=replace(config, architectures=(architecture,), raw=raw)))
    head = ScoreHead(read_size(config.raw, "hidden_size"), len(config.labels), context) if has_head else None
    return HeadlessModel(decoder, head)
