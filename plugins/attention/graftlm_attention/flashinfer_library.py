"""What this package takes from FlashInfer."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from graftlm.layers import CacheRows

__all__ = ["FlashInferLibrary", "PagedWrapper", "load_flashinfer"]


class PagedWrapper(Protocol):
    """One of FlashInfer's attention wrappers: `plan` once a step, then `run` for each layer of one kind.

    A plan is worked out on the host and goes to the device through a pinned buffer of the wrapper's own.
    """

    def plan(self, *arguments: Any, **settings: Any) -> None:
        """Work out who computes what, for the given index arrays."""
        ...

    def reset_workspace_buffer(self, float_workspace_buffer: Tensor, int_workspace_buffer: Tensor) -> None:
        """Take other memory for partial results and for the integers of plans."""
        ...

    def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor], **outputs: Any) -> Tensor:
        """Attend: q [n, H, D], keys and values [pages, page_size, H_kv, D]; return [n, H, D]."""
        ...


@dataclass(frozen=True, slots=True)
class FlashInferLibrary:
    """Constructors of wrappers, by their FlashInfer names, and the kernel that fills the cache.

    Attributes:
        decode: BatchDecodeWithPagedKVCacheWrapper.
        prefill: BatchPrefillWithPagedKVCacheWrapper.
        cascade: MultiLevelCascadeAttentionWrapper; its `run` takes no outputs.
        write_kv: write_kv(k, v, keys, values, out_slots), as in `triton_kv_write`.
    """

    decode: Callable[..., PagedWrapper]
    prefill: Callable[..., PagedWrapper]
    cascade: Callable[..., PagedWrapper]
    write_kv: Callable[[Tensor, Tensor, CacheRows, CacheRows, Tensor], None]


def load_flashinfer() -> FlashInferLibrary:
    """Import FlashInfer, which takes seconds, and Triton."""
    import flashinfer

    from graftlm_attention.triton_kv_write import write_kv

    return FlashInferLibrary(
        decode=flashinfer.BatchDecodeWithPagedKVCacheWrapper,
        prefill=flashinfer.BatchPrefillWithPagedKVCacheWrapper,
        cascade=flashinfer.MultiLevelCascadeAttentionWrapper,
        write_kv=write_kv,
    )
