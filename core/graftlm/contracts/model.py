"""The contract of a model: tokens to hidden states to logits, and weights from a checkpoint."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graftlm.contracts.attention import AttentionBackend, AttentionLayer
from graftlm.contracts.batch import ForwardBatch
from graftlm.errors import CheckpointError, InvariantError, UnsupportedFeatureError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["Model", "ModelCapabilities", "ModelConfig", "ModelContext"]


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """What a checkpoint's config.json says. Core reads the named fields; a model reads `raw` for the rest.

    Attributes:
        architectures: Hugging Face class names, such as ("LlamaForCausalLM",).
        vocab_size: V, rows of the embedding.
        max_position_embeddings: longest context in tokens.
        eos_token_ids: tokens that end an answer, from config.json and generation_config.json.
        raw: the whole of config.json; without its quantization_config where weights are decoded before they reach the
            model. A model that finds one refuses it, or reads those weights itself.
    """

    architectures: tuple[str, ...]
    vocab_size: int
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...] = ()
    raw: Mapping[str, Any] = field(default_factory=dict)

    @property
    def labels(self) -> tuple[str, ...]:
        """What the numbers of a score head stand for; two of no meaning where config.json is silent, as Transformers.

        Raises:
            CheckpointError: id2label does not name the labels 0, 1 and so on.
        """
        names = self.raw.get("id2label")
        if names is None:
            return tuple(f"LABEL_{i}" for i in range(self.raw.get("num_labels") or 2))
        places = [str(i) for i in range(len(names))] if isinstance(names, Mapping) else []
        if not places or set(map(str, names)) != set(places):
            raise CheckpointError(f"config.json needs id2label as a name for each of 0, 1 and so on, got {names!r}")
        by_place = {str(place): str(name) for place, name in names.items()}
        return tuple(by_place[place] for place in places)


@dataclass(frozen=True, slots=True)
class ModelCapabilities:
    """What core may ask of a model provider.

    Attributes:
        architectures: Hugging Face class names it serves.
        any_architecture: whether it serves, or refuses by itself, those that no provider names.
    """

    architectures: tuple[str, ...] = ()
    any_architecture: bool = False


@dataclass(frozen=True, slots=True)
class ModelContext:
    """What a model is created with.

    Attributes:
        config: of the checkpoint.
        device, dtype: of the parameters, which are made uninitialised.
        context_len: tokens of a request at most; None: config.max_position_embeddings.
        code_folder: the checkpoint's folder, if the configuration trusts Python code in it (`model.trust_remote_code`).
    """

    config: ModelConfig
    device: torch.device
    dtype: torch.dtype
    context_len: int | None = None
    code_folder: Path | None = None


class Model(ABC):
    """A decoder-only language model whose attention is paged.

    Invariants, each checked by `graftlm.testing.ModelConformance`:
        - A request's hidden states depend on its own tokens only, not on the rest of the batch (up to rounding).
        - A prompt in chunks gives the hidden states of the prompt in one piece (up to rounding).
        - `load_weights` sets every parameter, or raises: a missing, surplus or wrong-shaped tensor is an error that
          names it. Tied weights need to come once.
        - `attention_layers` lists every layer once, `layer_id` counting from 0.
        - A model with a head says how many labels it has, and `score` gives as many numbers.
        - It can be created on the meta device, where `load_weights` checks what it would check elsewhere.
    """

    @property
    @abstractmethod
    def attention_layers(self) -> Sequence[AttentionLayer]:
        """The attention layers, by layer_id; the KV cache is laid out from them."""

    @abstractmethod
    def bind_attention(self, backend: AttentionBackend) -> None:
        """Set the backend that every attention call site uses from now on. Called before the first `forward`."""

    @abstractmethod
    def forward(self, batch: ForwardBatch) -> Tensor:
        """Return the final hidden states, [T, hidden], or [W, hidden] of `batch.wanted_idx`.

        The backend has been prepared for this batch.
        """

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """Map [S, hidden] to [S, V], in any floating dtype."""

    @abstractmethod
    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copy a checkpoint's tensors in.

        Args:
            weights: (name in the checkpoint, tensor), each read when it is reached; tensors may be memory-mapped and
                of another dtype.

        Raises:
            WeightError: a tensor is missing, surplus or of the wrong shape.
        """

    @property
    def num_labels(self) -> int | None:
        """How many numbers `score` gives for a text, as config.json says; None: the model has no such head."""
        return None

    @property
    def repeats_calls(self) -> bool:
        """Whether `forward` does the same for all batches of as many one-token requests, whatever these tensors hold.

        It then reads nothing of the batch but `input_ids`, `positions` and `wanted_idx`, which is None, takes no value
        out of a tensor, keeps no tensor that it computed, and calls compiled kernels of its own through
        `graftlm.layers.call_native`. On a CPU, what it does is then recorded once, and repeated without its Python.
        """
        return False

    @property
    def selects_tokens(self) -> bool:
        """Whether `forward` looks at `batch.wanted_idx`.

        What the last layer does after its attention is then done for those tokens alone. Of a prompt that is one.
        """
        return False

    @property
    def generates(self) -> bool:
        """Whether `logits` are of use: the checkpoint has an output projection, or tied weights."""
        return True

    def score(self, hidden: Tensor) -> Tensor:
        """Map [S, hidden], the final hidden states of texts' last tokens, to [S, num_labels], in any floating dtype.

        Raises:
            InvariantError: the model has no such head, and says so by `num_labels`.
        """
        raise InvariantError(f"{type(self).__name__} has no head that scores texts")

    def update_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copy some of a checkpoint's tensors in, and keep the others; by default, all of them have to come.

        Arguments and errors are those of `load_weights`, but that no tensor is missing.
        """
        self.load_weights(weights)

    def read_weight(self, name: str) -> Tensor:
        """Return a copy of the weight that a checkpoint's tensor was loaded to, as the checkpoint would hold it.

        `pack_weights` has to be called afterwards if it was called before.

        Raises:
            RequestError: there is none of this name, or this model cannot give its weights back.
        """
        raise UnsupportedFeatureError(f"{type(self).__name__} does not give its weights back, such as {name!r}")

    def pack_weights(self) -> None:
        """Rearrange the loaded weights for the device's kernels, where that pays; by default, leave them as they are.

        Called after `load_weights`, unless the configuration says `model.prepack: false`. Loading again undoes it.
        """
