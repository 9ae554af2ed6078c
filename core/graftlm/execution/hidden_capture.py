"""Runs a model so that the inputs of some of its layers are returned with the final hidden states."""

from collections.abc import Sequence

import torch
from torch import Tensor

from graftlm.contracts import ForwardBatch, Model

__all__ = ["HiddenCapture"]


class HiddenCapture:
    """The forward pass of a model whose hidden states a draft head reads.

    Recorded steps and CUDA graphs contain the capture, so the hidden states never leave the device.

    Args:
        model: a model whose `captures_inputs` is True, if there are layers.
        layers: indices of the layers whose inputs are returned.
    """

    def __init__(self, model: Model, layers: Sequence[int]) -> None:
        self._model = model
        self._layers = tuple(layers)

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Return final hidden states and the inputs of n layers side by side, [T, hidden (1 + n)]."""
        if not self._layers:
            return self._model.forward(batch)
        hidden, inputs = self._model.forward_with_inputs(batch, self._layers)
        return torch.cat([hidden, *inputs], dim=-1)

    def final(self, states: Tensor) -> Tensor:
        """Return the final hidden states of a result of `forward`, [T, hidden], contiguous."""
        size = states.shape[1] // (1 + len(self._layers))
        return states[:, :size].contiguous()
