"""The contract of a format of quantized weights, which determines the tensors of a weight and their decoding."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Set
from typing import TYPE_CHECKING, Any, ClassVar, Self

from graftlm.errors import WeightError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from graftlm.checkpoint.quantized.coded_weight import CodedWeight

__all__ = ["WeightFormat", "WeightParts"]


class WeightFormat(ABC):
    """The format of a checkpoint's quantized weights.

    A tensor's name is the name of a module, such as "model.layers.0.mlp.up_proj", and a last part, such as "qweight".

    Attributes:
        parts: last parts of the names of a weight's tensors.
        ignored: last parts of tensors that are not used: scales of activations, or of keys and values.
    """

    parts: ClassVar[Set[str]]
    ignored: ClassVar[Set[str]] = frozenset()

    @classmethod
    @abstractmethod
    def from_config(cls, settings: Mapping[str, Any]) -> Self:
        """Read a checkpoint's quantization_config.

        Raises:
            CheckpointError: an entry is missing or wrong.
            UnsupportedArchitectureError: this variant of the format is not supported.
        """

    @property
    @abstractmethod
    def summary(self) -> str:
        """The format in a few words, for the log."""

    @abstractmethod
    def main_part(self, parts: Set[str]) -> str | None:
        """Return the part whose tensor the decoded weight replaces; None if a module with these parts is plain."""

    @abstractmethod
    def coded_weight(self, parts: WeightParts) -> CodedWeight:
        """Return the weight that the tensors contain.

        Raises:
            WeightError: a tensor is missing.
            ValueError: the tensors do not match.
        """


class WeightParts:
    """The tensors of one quantized weight.

    Args:
        module: name of the module, which is the start of the tensors' names.
        tensors: last part of a tensor's name -> tensor.
    """

    def __init__(self, module: str, tensors: Mapping[str, Tensor]) -> None:
        self._module = module
        self._tensors = tensors

    @property
    def num_bytes(self) -> int:
        """Size of the tensors in bytes."""
        return sum(tensor.nbytes for tensor in self._tensors.values())

    def __contains__(self, part: str) -> bool:
        return part in self._tensors

    def __getitem__(self, part: str) -> Tensor:
        """Return a tensor.

        Raises:
            WeightError: the checkpoint lacks it.
        """
        if part not in self._tensors:
            raise WeightError(f"The checkpoint lacks '{self._module}.{part}', but has {self._listing()}")
        return self._tensors[part]

    def matrix(self, part: str) -> Tensor:
        """Return a tensor of two dimensions.

        Raises:
            WeightError: the checkpoint does not have the tensor.
            ValueError: the tensor does not have two dimensions.
        """
        tensor = self[part]
        if tensor.dim() != 2:
            raise ValueError(f"{part} must be a matrix")
        return tensor

    def get(self, part: str) -> Tensor | None:
        """Return a tensor, or None if the checkpoint has none of that name."""
        return self._tensors.get(part)

    def decoded_by(self, weight_format: WeightFormat, dtype: torch.dtype) -> Tensor:
        """Return the weight, [N, K].

        Raises:
            WeightError: a tensor is missing, or the tensors do not match.
        """
        try:
            return weight_format.coded_weight(self).decoded(dtype)
        except ValueError as error:
            raise WeightError(
                f"The checkpoint's {self._module!r} does not match the format {weight_format.summary}: {error}. It has "
                f"{self._listing()}"
            ) from error

    def _listing(self) -> str:
        parts = sorted(self._tensors.items())
        return ", ".join(f"{name} {list(it.shape)} {str(it.dtype).removeprefix('torch.')}" for name, it in parts)
