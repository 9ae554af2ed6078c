"""Creates a hierarchical cache from its options."""

import numpy as np

from graftlm.contracts import CacheContext, KVTransfer
from graftlm.errors import ConfigError
from graftlm_cache.hicache.cache import HierarchicalCache
from graftlm_cache.hicache.host_tier import HostTier
from graftlm_cache.hicache.options import HicacheOptions, StorageOptions
from graftlm_cache.hicache.storage_tier import StorageTier
from graftlm_cache.hicache.writing import write_policy
from graftlm_cache.radix import RadixCache

__all__ = ["create_hicache"]

_MIN_BLOCK_TOKENS = 64


def create_hicache(options: HicacheOptions, context: CacheContext) -> HierarchicalCache:
    """Return a hierarchical cache over a radix cache. If the context has no transfer, it has only the device tier.

    Raises:
        ConfigError: `block_tokens` is not a multiple of the page size, or host memory is smaller than one block.
    """
    block_tokens = _block_tokens(options, context.page_size)
    host = HostTier(_host_memory(options, context, block_tokens))
    return HierarchicalCache(
        RadixCache(context),
        host,
        _storage(options.storage, context, host),
        context.transfer,
        write_policy(options, host.num_slots),
        wait_s=None if options.storage is None else _wait_s(options.storage),
        page_size=context.page_size,
        block_tokens=block_tokens,
        clock=context.clock,
    )


def _block_tokens(options: HicacheOptions, page_size: int) -> int:
    block_tokens = options.block_tokens
    if block_tokens is None:
        return -(-_MIN_BLOCK_TOKENS // page_size) * page_size
    if block_tokens % page_size:
        raise ConfigError(
            f"cache.options.block_tokens is {block_tokens}, which is not a multiple of cache.page_size {page_size}. "
            f"Set it to {-(-block_tokens // page_size) * page_size}."
        )
    return block_tokens


def _host_memory(
    options: HicacheOptions, context: CacheContext, block_tokens: int
) -> "np.ndarray[tuple[int, int], np.dtype[np.uint8]]":
    """Allocate the host memory: uint8 [num_blocks, block_bytes]."""
    transfer: KVTransfer | None = context.transfer
    if transfer is None:
        return np.empty((0, 0), dtype=np.uint8)
    pages_per_block = block_tokens // context.page_size
    block_bytes = pages_per_block * transfer.page_bytes
    if options.host_tokens is not None:
        num_blocks, option = options.host_tokens // block_tokens, f"host_tokens {options.host_tokens}"
    else:
        num_blocks, option = int(options.host_gib * 2**30) // block_bytes, f"host_gib {options.host_gib}"
    if num_blocks == 0:
        raise ConfigError(
            f"cache.options.{option} is less than one block of {block_tokens} tokens, {block_bytes} bytes. Increase "
            "it, or decrease cache.options.block_tokens."
        )
    return transfer.allocate(num_blocks, pages_per_block)


def _storage(options: StorageOptions | None, context: CacheContext, host: HostTier) -> StorageTier | None:
    if options is None or context.transfer is None or context.create_storage is None:
        return None
    storage = context.create_storage(options.name, options.options, host.memory.shape[1])
    return StorageTier(storage, host, context.transfer.dtype)


def _wait_s(options: StorageOptions) -> float | None:
    """Return the maximum time that a request waits for storage, in seconds; None: it waits for the whole prefetch."""
    if options.prefetch == "best_effort":
        return 0.0
    return options.prefetch_timeout_s if options.prefetch == "timeout" else None
