"""The contract of a media processor, which converts pictures to parts of prompts and to features of the text model.

The text model computes a picture like text: each row of the picture's features replaces the embedding of one token.

    prompt     "Look: <marker> What is it?"                  one marker for each picture
    text       "Look: <start><feature><feature>...<end> ..." `PreparedMedia.text` replaces the marker
    features   [num_features, width]                         row i replaces the embedding of feature token i
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from graftlm.contracts.model import ModelConfig
from graftlm.types import TokenIds

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

__all__ = ["MediaCapabilities", "MediaContext", "MediaProcessor", "MediaTower", "Picture", "PreparedMedia"]

#: A decoded picture: uint8 [H, W, 3], red, green and blue.
Picture: TypeAlias = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class MediaCapabilities:
    """The checkpoints that a media provider supports.

    Attributes:
        architectures: class names in config.json, such as "LlavaForConditionalGeneration".
    """

    architectures: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class MediaContext:
    """The arguments of a media processor's `create`.

    Attributes:
        config: configuration of the text model; `config.media` is the whole config.json.
        path: the checkpoint's folder.
        code_folder: the checkpoint's folder if `model.trust_remote_code` allows its Python code to run, else None.
    """

    config: ModelConfig
    path: Path
    code_folder: Path | None = None


@dataclass(frozen=True, slots=True)
class PreparedMedia:
    """One picture, prepared for the prompt and for the tower.

    Attributes:
        text: text that replaces the marker. It contains `num_features` feature tokens, possibly between other tokens.
        num_features: number of rows of the picture's features.
        inputs: name -> array of the tower's inputs.
    """

    text: str
    num_features: int
    inputs: Mapping[str, NDArray[Any]] = field(default_factory=dict)


class MediaTower(ABC):
    """Computes the features of pictures on the device. One thread calls it."""

    @property
    @abstractmethod
    def width(self) -> int:
        """Number of elements in a row of features."""

    @property
    def stages(self) -> Sequence[nn.Module]:
        """Modules that `features` calls one after the other. Between two of them, the core may run other steps.

        A tower without stages computes each picture in one piece.
        """
        return ()

    @abstractmethod
    def features(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Return one picture's features, [num_features, width], in the model's dtype.

        Args:
            inputs: `PreparedMedia.inputs` on the device, in their original dtypes.
        """


class MediaProcessor(ABC):
    """Prepares pictures for one checkpoint, and loads the checkpoint's tower.

    Several threads call `prepare` and `rope_positions`. They need no device.

    Invariants, each checked by `graftlm.testing.MediaConformance`:
        - The text of a prepared picture contains exactly `num_features` feature tokens.
        - The same picture always has the same text and the same inputs.
        - A picture's features have the shape [num_features, width], are finite, and do not depend on other pictures.
        - `rope_positions` returns int64 [3, n] for each prompt, or None for each prompt.
    """

    @property
    @abstractmethod
    def marker(self) -> str:
        """The text in a prompt that stands for a picture; the tokenizer encodes it as one token."""

    @property
    @abstractmethod
    def feature_token_id(self) -> int:
        """The token whose embedding is replaced by a row of features."""

    @property
    @abstractmethod
    def settings(self) -> bytes:
        """Bytes that differ between processors that prepare the same picture differently."""

    @property
    def chat_template(self) -> str | None:
        """The Jinja chat template of the checkpoint's processor, for tokenizers without one; None if there is none."""
        return None

    @property
    def attends_both_ways(self) -> bool:
        """Whether the text model's attention inside a run of feature tokens is not causal."""
        return False

    @abstractmethod
    def prepare(self, picture: Picture) -> PreparedMedia:
        """Prepare a picture.

        Raises:
            RequestError: the model cannot use this picture, such as one with an extreme aspect ratio.
        """

    def rope_positions(self, token_ids: TokenIds, items: Sequence[PreparedMedia]) -> NDArray[np.int64] | None:
        """Return the positions of a prompt's tokens for the rotary embedding, int64 [3, n]: time, height and width.

        A token after the prompt has the largest position plus one on all three axes, and so on. None: positions are
        0, 1, 2 and so on.

        Args:
            token_ids: int32 [n], the prompt with `feature_token_id` in place of the features.
            items: the prompt's pictures, in order.
        """
        return None

    @abstractmethod
    def load_tower(self, weights: Iterable[tuple[str, Tensor]], device: torch.device, dtype: torch.dtype) -> MediaTower:
        """Load the tower.

        Args:
            weights: (name in the checkpoint, tensor) of all tensors that do not belong to the text model.

        Raises:
            WeightError: a tensor is missing or of the wrong shape.
        """
