"""The interface of FlashInfer that this package uses."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from graftlm.layers import CacheRows

__all__ = ["FlashInferLibrary", "PagedWrapper", "load_flashinfer"]


class PagedWrapper(Protocol):
    """One of FlashInfer's attention wrappers: call `plan` once per step, then `run` for each layer of one kind.

    A plan is computed on the host and copied to the device through a pinned buffer that the wrapper owns.
    """

    def plan(self, *arguments: Any, **settings: Any) -> None:
        """Distribute the work over the device's multiprocessors, for the given index arrays."""
        ...

    def reset_workspace_buffer(self, float_workspace_buffer: Tensor, int_workspace_buffer: Tensor) -> None:
        """Replace the buffers for partial results and for the integers of plans."""
        ...

    def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor], **outputs: Any) -> Tensor:
        """Compute attention for q [n, H, D], keys and values [pages, page_size, H_kv, D]; return [n, H, D]."""
        ...


@dataclass(frozen=True, slots=True)
class FlashInferLibrary:
    """The constructors of FlashInfer's wrappers, and the kernel that writes the cache.

    Attributes:
        decode: BatchDecodeWithPagedKVCacheWrapper.
        prefill: BatchPrefillWithPagedKVCacheWrapper.
        cascade: MultiLevelCascadeAttentionWrapper; its `run` has no `out` argument.
        write_kv: write_kv(k, v, keys, values, out_slots); see `triton_kv_write`.
    """

    decode: Callable[..., PagedWrapper]
    prefill: Callable[..., PagedWrapper]
    cascade: Callable[..., PagedWrapper]
    write_kv: Callable[[Tensor, Tensor, CacheRows, CacheRows, Tensor], None]


def load_flashinfer() -> FlashInferLibrary:
    """Import FlashInfer and Triton, and return the functions; importing FlashInfer takes seconds."""
    import flashinfer

    from graftlm_attention.triton_kv_write import write_kv

    return FlashInferLibrary(
        decode=flashinfer.BatchDecodeWithPagedKVCacheWrapper,
        prefill=flashinfer.BatchPrefillWithPagedKVCacheWrapper,
        cascade=flashinfer.MultiLevelCascadeAttentionWrapper,
        write_kv=write_kv,
    )
