"""Prefix caches that come with graftlm: `radix` and `chunk`; and the KV storage `file`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from graftlm import Provider, hookimpl
from graftlm.contracts import CacheCapabilities

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
