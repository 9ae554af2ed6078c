"""The contract of a model, which computes hidden states and logits and loads a checkpoint's weights."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graftlm.contracts.attention import AttentionBackend, AttentionLayer
from graftlm.contracts.batch import ForwardBatch
from graftlm.contracts.parallel import ONE_RANK, ParallelContext
from graftlm.contracts.state import StateLayer
from graftlm.errors import CheckpointError, InvariantError, UnsupportedArchitectureError, UnsupportedFeatureError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from graftlm.contracts.draft_head import DraftHead, DraftHeadContext

__all__ = ["Model", "ModelCapabilities", "ModelConfig", "ModelContext"]


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A checkpoint's config.json. Core reads the named fields; a model reads other fields from `raw`.

    Attributes:
        architectures: Hugging Face class names, such as ("LlamaForCausalLM",).
        vocab_size: V, number of rows of the embedding.
        max_position_embeddings: longest context in tokens.
        eos_token_ids: tokens that end an output, from config.json and generation_config.json.
        raw: content of config.json. If the core decodes quantized weights before the model receives them, the field
            quantization_config is removed. Otherwise a model refuses quantization_config or decodes the weights itself.
        media: config.json of a checkpoint with a tower for pictures; the other fields are those of its text model. None
            for a checkpoint without a tower.
    """

    architectures: tuple[str, ...]
    vocab_size: int
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...] = ()
    raw: Mapping[str, Any] = field(default_factory=dict)
    media: Mapping[str, Any] | None = None

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of a score head's outputs. If config.json has no names, they are LABEL_0, LABEL_1 and so on.

        Raises:
            CheckpointError: the keys of id2label are not 0, 1 and so on.
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
    """The features that a model provider supports.

    Attributes:
        architectures: Hugging Face class names of the supported architectures.
        any_architecture: whether the provider is also tried for architectures that no provider lists; it may refuse
            such an architecture.
        tensor_parallel: whether the models split their layers by `ModelContext.parallel`.
    """

    architectures: tuple[str, ...] = ()
    any_architecture: bool = False
    tensor_parallel: bool = False


@dataclass(frozen=True, slots=True)
class ModelContext:
    """The arguments of a model's `create`.

    Attributes:
        config: the checkpoint's configuration.
        device, dtype: device and dtype of the parameters. A model creates them uninitialized.
        context_len: maximum number of tokens of a request; None: config.max_position_embeddings.
        code_folder: the checkpoint's folder if `model.trust_remote_code` allows its Python code to run, else None.
        parallel: the place of this rank among the ranks that split every layer. All ranks run `forward` and `logits`
            with the same batches, and both methods return the same values on all ranks.
    """

    config: ModelConfig
    device: torch.device
    dtype: torch.dtype
    context_len: int | None = None
    code_folder: Path | None = None
    parallel: ParallelContext = ONE_RANK


class Model(ABC):
    """A decoder-only language model with paged attention.

    Invariants, each checked by `graftlm.testing.ModelConformance`:
        - A request's hidden states depend only on its own tokens, not on other requests in the batch (up to rounding).
        - A prompt has the same hidden states whether it is prefilled in chunks or in one piece (up to rounding).
        - `load_weights` sets every parameter or raises. A missing, unexpected or wrong-shaped tensor is an error with
          the tensor's name. Tied weights are passed only once.
        - `attention_layers` contains every attention layer once; `layer_id` is counted from 0.
        - `state_layers` contains every layer with a recurrent state once; `layer_id` is counted from 0. `forward` reads
          and writes only the slots of `batch.state`, and a copied state continues like the original.
        - A model with a score head returns `num_labels`, and `score` returns that many numbers per text.
        - If `captures_inputs` is True, `forward_with_inputs` returns `forward`'s result, and the input of layer 0 is
          `embed_tokens`.
        - A model can be created on the meta device, where `load_weights` makes the same checks.
    """

    @property
    @abstractmethod
    def attention_layers(self) -> Sequence[AttentionLayer]:
        """The attention layers in order of layer_id; they define the KV cache's layout."""

    @abstractmethod
    def bind_attention(self, backend: AttentionBackend) -> None:
        """Set the backend that all attention layers use. Called before the first `forward`."""

    @property
    def state_layers(self) -> Sequence[StateLayer]:
        """The layers with a recurrent state in order of layer_id; empty if all layers use only keys and values."""
        return ()

    def bind_states(self, states: Sequence[Sequence[Tensor]]) -> None:
        """Set the memory of recurrent states. Called before the first `forward`, if there are state layers.

        Args:
            states: for each layer of `state_layers`, a tensor [slots, *shape] for each tensor of its state.

        Raises:
            InvariantError: the model has no state layers.
        """
        raise InvariantError(f"{type(self).__name__} has no layers with a recurrent state")

    @abstractmethod
    def forward(self, batch: ForwardBatch) -> Tensor:
        """Return the final hidden states: of all tokens, [T, hidden], or of the tokens `batch.wanted_idx`, [W, hidden].

        The attention backend must have been prepared for this batch.
        """

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """Map hidden states, [S, hidden], to logits, [S, V], in any floating dtype."""

    @abstractmethod
    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copy a checkpoint's tensors to the parameters.

        Args:
            weights: pairs (name in the checkpoint, tensor). Each tensor is read when the iteration reaches it. A tensor
                may be memory-mapped, and its dtype may differ from the parameter's.

        Raises:
            WeightError: a tensor is missing, unexpected or of the wrong shape.
        """

    @property
    def num_labels(self) -> int | None:
        """Number of values that `score` returns per text, from config.json; None: the model has no score head."""
        return None

    @property
    def repeats_calls(self) -> bool:
        """Whether `forward` makes the same kernel calls for all decode batches of one size and for all tensor values.

        If True, `forward` reads only `input_ids`, `positions`, `state` and `wanted_idx` (which is None) of the batch.
        It does not read values of tensors in Python, and stores no computed tensor except recurrent states. It calls
        its own compiled kernels through `graftlm.layers.call_native`. On a CPU, the calls are recorded once and then
        replayed without the model's Python code.
        """
        return False

    @property
    def selects_tokens(self) -> bool:
        """Whether `forward` uses `batch.wanted_idx`.

        If True, the last layer computes only these tokens after its attention, which is usually one token per prompt.
        """
        return False

    @property
    def takes_features(self) -> bool:
        """Whether `forward` replaces embeddings by `batch.features`. Only such a model can serve pictures."""
        return False

    @property
    def captures_inputs(self) -> bool:
        """Whether the model implements `forward_with_inputs` and `embed_tokens`, which draft heads need."""
        return False

    def forward_with_inputs(self, batch: ForwardBatch, layers: Sequence[int]) -> tuple[Tensor, list[Tensor]]:
        """Return `forward(batch)`, and the hidden states [T, hidden] that are the inputs of some layers.

        Args:
            batch: the batch; its `wanted_idx` is None.
            layers: indices of layers, from 0 to the number of layers; the latter stands for the output of the last
                layer, before the final norm.

        Raises:
            UnsupportedFeatureError: the model's `captures_inputs` is False.
        """
        raise UnsupportedFeatureError(f"{type(self).__name__} does not return the inputs of its layers")

    def embed_tokens(self, token_ids: Tensor) -> Tensor:
        """Map token ids, int64 [T], to the input of layer 0, [T, hidden].

        Raises:
            UnsupportedFeatureError: the model's `captures_inputs` is False.
        """
        raise UnsupportedFeatureError(f"{type(self).__name__} does not return its token embeddings")

    def draft_head(self, context: DraftHeadContext) -> DraftHead:
        """Create the draft head that is part of the model's checkpoint, without weights.

        Raises:
            ModelError: the checkpoint has no draft head, or the architecture has none.
        """
        raise UnsupportedArchitectureError(
            f"{', '.join(context.served.config.architectures)}: this model has no draft head (MTP layer) in its "
            "checkpoint, or graftlm does not support it"
        )

    @property
    def generates(self) -> bool:
        """Whether the model can generate: the checkpoint has an output projection, or tied weights."""
        return True

    def score(self, hidden: Tensor) -> Tensor:
        """Map hidden states of last tokens, [S, hidden], to scores, [S, num_labels], in any floating dtype.

        Raises:
            InvariantError: the model has no score head; its `num_labels` is None.
        """
        raise InvariantError(f"{type(self).__name__} has no head that scores texts")

    def update_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copy some of a checkpoint's tensors to the parameters; leave the other parameters unchanged.

        Arguments and errors are those of `load_weights`, but tensors may be missing. The default implementation calls
        `load_weights`, and therefore needs all tensors.
        """
        self.load_weights(weights)

    def read_weight(self, name: str) -> Tensor:
        """Return a copy of a loaded weight, in the form that the checkpoint stores.

        Reading may undo `pack_weights`: if the weights were packed, the caller must pack them again afterwards.

        Raises:
            RequestError: there is no weight of this name, or this model does not support reading weights.
        """
        raise UnsupportedFeatureError(f"{type(self).__name__} does not support reading its weights, such as {name!r}")

    def pack_weights(self) -> None:
        """Rearrange the loaded weights for the device's kernels; the default implementation does nothing.

        The method is called after `load_weights`, unless the configuration has `model.prepack: false`. A further call
        of `load_weights` undoes the packing.
        """
