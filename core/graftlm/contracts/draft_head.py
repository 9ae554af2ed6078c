"""The contract of a draft head: a network of one layer that drafts from the served model's hidden states.

At position p, a head reads the hidden state of the served model at p, and the token at p + 1. Its output predicts the
token at p + 2, and replaces the hidden state at the next position:

    position                0    1    2    3    4
    tokens                 t0   t1   t2   t3        t3 was sampled last
    hidden state           h0   h1   h2   o2   o3   o2: the head's output at position 2
    token that is read     t1   t2   t3   d4   d5
    drafted token                    d4   d5   d6

Keys and values of the head are an additional layer in the pages of the served model's KV memory. Each step writes them
for all its tokens. Therefore a prefix from the cache has them too.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from graftlm.contracts.attention import AttentionBackend, AttentionLayer
from graftlm.contracts.draft_model import Continuations
from graftlm.contracts.provider import Options
from graftlm.types import TokenIds

if TYPE_CHECKING:
    from torch import Tensor

    from graftlm.contracts.model import Model, ModelContext

__all__ = ["DraftHead", "DraftHeadBatch", "DraftHeadContext", "DraftHeadOptions", "DraftHeads"]


class DraftHeadOptions(Options):
    """Options of a drafter with a draft head; the drafter's own options class derives from this one.

    `auto` does not select a drafter with such options, because few checkpoints have a head.
    """

    max_drafts: int = Field(
        default=5,
        ge=1,
        le=64,
        description="Maximum length of a draft in tokens. Each token takes one step of the draft head.",
    )


@dataclass(frozen=True, slots=True)
class DraftHeadContext:
    """The arguments of a function that creates a draft head.

    Attributes:
        served: context of the served model, with the device and the dtype of the head's parameters.
        model: the served model, whose token embedding and output projection a head may use.
        layer_id: `layer_id` of the head's attention layer.
        raw: content of config.json of the head's checkpoint; that of the served model if the head is part of it.
    """

    served: ModelContext
    model: Model
    layer_id: int
    raw: Mapping[str, Any]


class DraftHead(ABC):
    """A network of one decoder layer. Its parameters are created uninitialized.

    In all methods, T is a number of tokens. A feature is a vector of F numbers that represents a hidden state.
    """

    @property
    @abstractmethod
    def attention_layer(self) -> AttentionLayer:
        """The attention layer, without a sliding window."""

    @property
    @abstractmethod
    def hidden_layers(self) -> tuple[int, ...]:
        """Indices of the served model's layers whose inputs the head reads, from 0 to the number L of layers.

        L stands for the output of the last layer, before the final norm.
        """

    @property
    @abstractmethod
    def feature_size(self) -> int:
        """F, size of a feature."""

    @abstractmethod
    def bind_attention(self, backend: AttentionBackend) -> None:
        """Set the backend of the attention layer. Called before the first `forward`."""

    @abstractmethod
    def features(self, hidden: Tensor) -> Tensor:
        """Map hidden states [T, H (1 + n)] to features [T, F].

        Args:
            hidden: the served model's final hidden states, followed by the inputs of the n layers `hidden_layers`.
        """

    @abstractmethod
    def keys_and_values(self, features: Tensor, token_ids: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys [T, H_kv, D] and values [T, H_kv, D_v] in the form that `AttentionBackend.forward` gets.

        Args:
            features: [T, F].
            token_ids: int64 [T], the token after each position.
            positions: int64 [T].
        """

    @abstractmethod
    def forward(self, features: Tensor, token_ids: Tensor, positions: Tensor) -> Tensor:
        """Return the features of the next positions, [T, F]; the arguments are those of `keys_and_values`.

        The attention backend must have been prepared for a batch of these tokens.
        """

    @abstractmethod
    def logits(self, features: Tensor) -> Tensor:
        """Map features that `forward` returned, [T, F], to logits [T, N], in any floating dtype."""

    def token_ids(self, idx: Tensor) -> Tensor:
        """Map indices of logits, int64 [T], to token ids of the served model; by default, they are equal."""
        return idx

    @property
    def weight_prefix(self) -> str:
        """Prefix of the names of the head's tensors; other tensors of the checkpoint are not read."""
        return ""

    @abstractmethod
    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copy the tensors whose names begin with `weight_prefix` to the parameters.

        Args:
            weights: see `Model.load_weights`.

        Raises:
            WeightError: a tensor is missing, unexpected or of the wrong shape.
        """

    def pack_weights(self) -> None:
        """Rearrange the loaded weights for the device's kernels; by default, do nothing."""


@dataclass(frozen=True, slots=True)
class DraftHeadBatch:
    """B requests to draft for. All their tokens except the latest are in KV memory.

    Attributes:
        rows: int32 [B], rows of the requests.
        lens: int64 [B], number of tokens of each request, at least 2.
        token_ids: int64 [B], the latest token of each request.
        limits: int32 [B], number of tokens to draft for each request, at least 1; k is the largest of them.
    """

    rows: NDArray[np.int32]
    lens: NDArray[np.int64]
    token_ids: NDArray[np.int64]
    limits: NDArray[np.int32]

    @classmethod
    def of(cls, requests: Iterable[tuple[int, TokenIds, int]]) -> DraftHeadBatch:
        """Return the batch of some requests, each given as (row, token ids, limit)."""
        rows, token_ids, limits = zip(*requests, strict=True)
        return cls(
            rows=np.array(rows, dtype=np.int32),
            lens=np.array([len(ids) for ids in token_ids], dtype=np.int64),
            token_ids=np.array([ids[-1] for ids in token_ids], dtype=np.int64),
            limits=np.array(limits, dtype=np.int32),
        )


class DraftHeads(Protocol):
    """A loaded draft head of an engine. Only the engine's thread calls it, while no step is in flight."""

    def run(self, batch: DraftHeadBatch) -> Continuations:
        """Draft for a batch, and wait for the result.

        Returns: the drafts. A draft is shorter than its limit if the request's pages are full: the probabilities after
            its last token are 0. All probabilities of a request are 0 if the hidden state of its last computed token is
            not known.

        Effects: writes keys and values at positions after the requests' computed tokens.
        """
        ...
