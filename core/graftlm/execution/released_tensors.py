"""Releases the memory of tensors that are not needed for some time."""

from collections.abc import Iterable

import torch
from torch import Tensor

from graftlm.runtime.os_memory import discard_pages, trim_heap

__all__ = ["ReleasedTensors", "return_free_memory"]


class ReleasedTensors:
    """Tensors whose memory is released until `restore`. They keep their shape, and their content is lost.

    On a CPU, the addresses stay valid and the memory takes RAM again at the first write. On a GPU, the tensors have no
    memory until `restore`, and other addresses afterwards.

    Args:
        tensors: the tensors, whose memory is released now. Other views of their memory lose their content too.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._sizes: list[tuple[torch.UntypedStorage, int]] = []
        storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}
        for storage in storages.values():
            if storage.device.type == "cpu":
                discard_pages(storage.data_ptr(), storage.nbytes())
            else:
                self._sizes.append((storage, storage.nbytes()))
                storage.resize_(0)

    @property
    def changes_addresses(self) -> bool:
        """Whether the tensors have other addresses after `restore`."""
        return bool(self._sizes)

    def restore(self) -> None:
        """Allocate the memory again, uninitialized. After an error, `restore` may be called again.

        Raises:
            RuntimeError: the device has too little free memory.
        """
        for storage, num_bytes in self._sizes:
            storage.resize_(num_bytes)


def return_free_memory() -> None:
    """Return memory that PyTorch and the C library keep for later allocations."""
    trim_heap()
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()
