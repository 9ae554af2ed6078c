"""The built-in prefix caches: `radix`, `chunk`, `swa_radix`, `swa_chunk`, `hicache`; and the KV storage `file`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from graftlm import Provider, hookimpl
from graftlm.contracts import CacheCapabilities
from graftlm_cache.hicache.options import HicacheOptions
from graftlm_cache.options import RadixOptions

if TYPE_CHECKING:
    from graftlm.contracts import CacheContext, KVStorage, NoOptions, PrefixCache, StorageContext
    from graftlm_cache.file_storage import FileStorageOptions

__all__ = ["provide_kv_storages", "provide_prefix_caches"]


def _create_radix(options: RadixOptions, context: CacheContext) -> PrefixCache:
    from graftlm_cache.radix import RadixCache
    from graftlm_cache.state_radix import StateRadixCache

    if context.states is None:
        return RadixCache(context)
    return StateRadixCache(context, context.states, options.state_interval_tokens)


def _create_chunk(options: NoOptions, context: CacheContext) -> PrefixCache:
    from graftlm_cache.chunk import ChunkCache

    return ChunkCache(context)


def _create_swa_radix(options: NoOptions, context: CacheContext) -> PrefixCache:
    from graftlm_cache.radix import RadixCache
    from graftlm_cache.swa_radix import SWARadixCache

    return RadixCache(context) if context.window is None else SWARadixCache(context, context.window)


def _create_hicache(options: HicacheOptions, context: CacheContext) -> PrefixCache:
    from graftlm_cache.hicache.create import create_hicache

    return create_hicache(options, context)


@hookimpl
def provide_prefix_caches() -> list[Provider[PrefixCache]]:
    """Return the providers of the built-in prefix caches."""
    return [
        Provider(
            name="radix",
            summary="Shares every common prefix between requests, in a radix tree over pages",
            api_version=1,
            create=_create_radix,
            options=RadixOptions,
            capabilities=CacheCapabilities(reuses=True, state=True),
            rank=10,
        ),
        Provider(
            name="chunk",
            summary="Caches nothing: every request computes its whole prompt",
            api_version=1,
            create=_create_chunk,
            capabilities=CacheCapabilities(reuses=False, state=True),
        ),
        Provider(
            name="swa_radix",
            summary="Like radix, but keeps pages of sliding-window layers only where prompts continue",
            api_version=1,
            create=_create_swa_radix,
            capabilities=CacheCapabilities(reuses=True, window=True),
        ),
        Provider(
            name="swa_chunk",
            summary="Caches nothing, and frees pages of sliding-window layers that are before the window",
            api_version=1,
            create=_create_chunk,
            capabilities=CacheCapabilities(reuses=False, window=True),
        ),
        Provider(
            name="hicache",
            summary="Radix cache that copies prefixes to host memory and storage, and loads them from there",
            api_version=1,
            create=_create_hicache,
            options=HicacheOptions,
            capabilities=CacheCapabilities(reuses=True, tiers=True),
        ),
    ]


def _create_file(options: FileStorageOptions, context: StorageContext) -> KVStorage:
    from graftlm_cache.file_storage import FileStorage

    return FileStorage(options, context)


@hookimpl
def provide_kv_storages() -> list[Provider[KVStorage]]:
    """Return the provider of the built-in KV storage."""
    from graftlm_cache.file_storage import FileStorageOptions

    return [
        Provider(
            name="file",
            summary="Stores blocks as files in one folder; they survive a restart, and replicas share them",
            api_version=1,
            create=_create_file,
            options=FileStorageOptions,
            rank=10,
        )
    ]
