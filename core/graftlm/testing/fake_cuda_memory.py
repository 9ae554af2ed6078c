"""Records which host storages of a fake CUDA device are pinned, and which are targets of unfinished copies."""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from graftlm.testing.fake_cuda_errors import EarlyReadError

__all__ = ["HostMemory", "Moment"]

#: Stream id -> number of calls of this stream that have run.
Moment = Mapping[int, int]


class HostMemory:
    """A record of the state of host storages. It has only weak references to pinned storages."""

    def __init__(self) -> None:
        self._pinned: set[StorageWeakRef] = set()
        # Target storage of a copy -> (tensor, stream id and stream position of the copy).
        self._expected: dict[StorageWeakRef, tuple[Tensor, int, int]] = {}

    def pin(self, tensor: Tensor) -> Tensor:
        """Mark a tensor's storage as pinned and return the tensor."""
        self._pinned.add(_storage(tensor))
        return tensor

    def is_pinned(self, tensor: Tensor) -> bool:
        """Return whether a tensor's storage is pinned."""
        return _storage(tensor) in self._pinned

    def expect(self, tensor: Tensor, at: tuple[int, int]) -> None:
        """Record that a copy into a tensor was launched.

        Args:
            tensor: a tensor on the CPU.
            at: id of the stream, and position of the copy in this stream.
        """
        self._expected[_storage(tensor)] = (tensor, *at)

    def check_arrived(self, tensor: Tensor, what: str) -> None:
        """Check that the host has waited for all copies into a tensor.

        Args:
            tensor: a tensor on the CPU.
            what: name of the call that reads the tensor, for the message.

        Raises:
            EarlyReadError: the host has not waited for a copy.
        """
        if self._expected and _storage(tensor) in self._expected:
            raise EarlyReadError(
                f"{what} reads a tensor of the CPU, {list(tensor.shape)}, before the host has waited for its copy"
            )

    def arrive(self, done: Moment) -> None:
        """Record which calls have run, and fill the targets of copies that have run with zeros.

        Args:
            done: stream id -> number of its calls that have run.
        """
        for storage, (tensor, stream, position) in list(self._expected.items()):
            if done.get(stream, 0) >= position:
                del self._expected[storage]
                with torch.inference_mode():
                    tensor.zero_()


def _storage(tensor: Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
