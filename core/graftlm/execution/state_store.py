"""The tensors of recurrent states."""

from collections.abc import Sequence

import torch
from torch import Tensor

from graftlm.contracts import StateLayer
from graftlm.execution.released_tensors import ReleasedTensors

__all__ = ["StateStore"]


class StateStore:
    """The state tensors of every layer, [slots, *shape]. Slot 0 is the initial state, which is zero.

    Other slots are not initialized. On a CPU, slots that were never written take no RAM.

    Args:
        layers: every state layer, in order of layer_id.
        num_slots: number of slots, including slot 0.
        device: device of all tensors.
    """

    def __init__(self, layers: Sequence[StateLayer], num_slots: int, device: torch.device) -> None:
        self._tensors = [
            [torch.empty(num_slots, *tensor.shape, dtype=tensor.dtype, device=device) for tensor in layer.tensors]
            for layer in layers
        ]
        self._released: ReleasedTensors | None = None
        self._write_initial_state()

    @staticmethod
    def bytes_per_slot(layers: Sequence[StateLayer]) -> int:
        """Return the number of bytes of one state in all layers."""
        return sum(layer.num_bytes for layer in layers)

    @property
    def tensors(self) -> Sequence[Sequence[Tensor]]:
        """The tensors of each layer; see `Model.bind_states`."""
        return self._tensors

    @property
    def num_bytes(self) -> int:
        """Number of bytes of all tensors."""
        return sum(tensor.nbytes for tensors in self._tensors for tensor in tensors)

    def release(self) -> None:
        """Release the memory of all tensors until `restore`. No step may run in the meantime."""
        if self._released is None:
            self._released = ReleasedTensors(tensor for tensors in self._tensors for tensor in tensors)

    def restore(self) -> None:
        """Allocate the memory again.

        Raises:
            RuntimeError: the device has too little free memory; the memory stays released.
        """
        if self._released is not None:
            self._released.restore()
            self._released = None
            self._write_initial_state()

    def _write_initial_state(self) -> None:
        for tensors in self._tensors:
            for tensor in tensors:
                tensor[0] = 0
