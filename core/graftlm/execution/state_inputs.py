"""The segments of recorded decode steps, in memory whose addresses do not change."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from graftlm.contracts import StateBatch, StateSegments

__all__ = ["StateInputs"]


class StateInputs:
    """The segments of decode steps, in arrays and tensors whose addresses do not change.

    Args:
        max_size: maximum number of requests of a step.
        states: the recurrent states of each layer, [slots, ...]; empty if the model has none.
    """

    def __init__(self, max_size: int, states: Sequence[Sequence[Tensor]]) -> None:
        self._states = [tensor for tensors in states for tensor in tensors]
        self._starts = np.arange(max_size, dtype=np.int32)
        self._lens = np.ones(max_size, dtype=np.int32)
        self._slots: NDArray[np.int32] = np.zeros((2, max_size), dtype=np.int32)
        self._device_slots = torch.zeros(2, max_size, dtype=torch.int64)
        self._by_size: dict[int, StateBatch] = {}

    def filled(self, segments: StateSegments) -> StateBatch:
        """Write the segments of a step, all of which decode, to the fixed memory; return the batch that reads it."""
        size = len(segments.starts)
        found = self._by_size.get(size)
        if found is None:
            sources, targets = self._slots[:, :size]
            fixed = StateSegments(self._starts[:size], self._lens[:size], sources, targets, size)
            found = self._by_size[size] = StateBatch(fixed, *self._device_slots[:, :size])
        for row, column in enumerate((segments.sources, segments.targets)):
            self._slots[row, :size] = column
            self._device_slots[row, :size] = torch.from_numpy(column)
        return found

    def restorer(self, batch: StateBatch | None) -> Callable[[], None]:
        """Copy the states that a step reads; return a function that restores them, so that the step can run again.

        Args:
            batch: the step's segments; None: the model has no states, and the function does nothing.
        """
        if batch is None:
            return lambda: None
        saved = [tensor.index_select(0, batch.sources) for tensor in self._states]

        def restore() -> None:
            for tensor, before in zip(self._states, saved, strict=True):
                tensor.index_copy_(0, batch.sources, before)

        return restore
