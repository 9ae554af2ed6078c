"""What lies below the device's memory, from the configuration: host memory, storage, and the copies between."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from graftlm.config import EngineConfig
from graftlm.contracts import KVStorage, StorageContext
from graftlm.execution.block_mover import BlockMover
from graftlm.execution.kv_store import KVStore
from graftlm.memory import TransferQueue
from graftlm.registry import Registry

__all__ = ["TierParts", "assemble_tiers"]


@dataclass(frozen=True, slots=True)
class TierParts:
    """What a cache with tiers below the device's memory is given.

    Attributes:
        mover: copies pages between the device and host memory, beside the steps.
        queue: the copies that wait for a step to go with.
        create_storage: from a storage provider's name, its options and a block's bytes to a storage.
    """

    mover: BlockMover
    queue: TransferQueue
    create_storage: Callable[[str, Mapping[str, Any], int], KVStorage]


def assemble_tiers(
    config: EngineConfig, registry: Registry, kv: KVStore, fingerprint: Callable[[], bytes]
) -> TierParts | None:
    """Return what the configured cache's lower tiers need, or None when it has none.

    Args:
        fingerprint: of the weights that the model holds, by which stored blocks are known; asked for each time that a
            cache is made.
    """
    provider = registry.provider("cache", config.cache.name)
    if not provider.capabilities.tiers:
        return None
    kv_dtype = str(kv.dtype).removeprefix("torch.")
    mover = BlockMover(kv, kv.device)
    queue = TransferQueue(kv.page_bytes, kv_dtype, config.cache.page_size, mover.allocate)

    def create_storage(name: str, options: Mapping[str, Any], block_bytes: int) -> KVStorage:
        context = StorageContext(fingerprint(), block_bytes)
        provider = registry.provider("storage", name)
        checked = registry.options(provider, options, "cache.options.storage.options", config.origins)
        storage: KVStorage = registry.create("storage", provider, checked, context)
        return storage

    return TierParts(mover, queue, create_storage)
