"""Host memory beside a fake CUDA device: which of it is pinned, and what is on its way to it."""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from graftlm.testing.fake_cuda_errors import EarlyReadError

__all__ = ["HostMemory", "Moment"]

#: Stream id -> how many of its calls are done: what is known to have run.
Moment = Mapping[int, int]


class HostMemory:
    """Knows storages by weak references, so that they live as long as they would without it."""

    def __init__(self) -> None:
        self._pinned: set[StorageWeakRef] = set()
        self._expected: dict[StorageWeakRef, tuple[Tensor, int, int]] = {}  # -> tensor, stream id, place in the stream

    def pin(self, tensor: Tensor) -> Tensor:
        """Count a tensor's storage as pinned; return the tensor."""
        self._pinned.add(_storage(tensor))
        return tensor

    def is_pinned(self, tensor: Tensor) -> bool:
        """Return whether a tensor's storage is pinned."""
        return _storage(tensor) in self._pinned

    def expect(self, tensor: Tensor, at: tuple[int, int]) -> None:
        """Note that a copy into a tensor was launched at a place of a stream."""
        self._expected[_storage(tensor)] = (tensor, *at)

    def check_arrived(self, tensor: Tensor, what: str) -> None:
        """Check that nothing is on its way to a tensor.

        Raises:
            EarlyReadError: something is.
        """
        if self._expected and _storage(tensor) in self._expected:
            raise EarlyReadError(
                f"{what} reads a tensor of the CPU, {list(tensor.shape)}, before the host has waited for its copy"
            )

    def arrive(self, done: Moment) -> None:
        """Note what is known to have run: tensors copied before are filled with zeros."""
        for storage, (tensor, stream, place) in list(self._expected.items()):
            if done.get(stream, 0) >= place:
                del self._expected[storage]
                with torch.inference_mode():
                    tensor.zero_()


def _storage(tensor: Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
