"""Prefix caches that come with graftlm: `radix`, `chunk`, both for windows, `hicache`; and the storage `file`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from graftlm import Provider, hookimpl
from graftlm.contracts import CacheCapabilities
from graftlm_cache.hicache.options import HicacheOptions

if TYPE_CHECKING:
    from graftlm.contracts import CacheContext, KVStorage, NoOptions, PrefixCache, StorageContext
    from graftlm_cache.file_storage import FileStorageOptions

__all__ = ["provide_kv_storages", "provide_prefix_caches"]


def _create_radix(options: NoOptions, context: CacheContext) -> PrefixCache:
    from graftlm_cache.radix import RadixCache

    return RadixCache(context)


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
    """Offer the built-in caches."""
    return [
        Provider(
            name="radix",
            summary="Shares every common prefix between requests, in a radix tree over pages",
            api_version=1,
            create=_create_radix,
            capabilities=CacheCapabilities(reuses=True),
            rank=10,
        ),
        Provider(
            name="chunk",
            summary="Keeps nothing: every request computes its whole prompt",
            api_version=1,
            create=_create_chunk,
            capabilities=CacheCapabilities(reuses=False),
        ),
        Provider(
            name="swa_radix",
            summary="As radix, and of sliding-window layers keeps only windows that prompts go on from",
            api_version=1,
            create=_create_swa_radix,
            capabilities=CacheCapabilities(reuses=True, window=True),
        ),
        Provider(
            name="swa_chunk",
            summary="Keeps nothing, and of sliding-window layers only the window",
            api_version=1,
            create=_create_chunk,
            capabilities=CacheCapabilities(reuses=False, window=True),
        ),
        Provider(
            name="hicache",
            summary="Radix cache whose prefixes move on to host memory and storage, and come back from there",
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
    """Offer the built-in storage."""
    from graftlm_cache.file_storage import FileStorageOptions

    return [
        Provider(
            name="file",
            summary="Keeps blocks in files of one folder, which survive a restart and which replicas share",
            api_version=1,
            create=_create_file,
            options=FileStorageOptions,
            rank=10,
        )
    ]
