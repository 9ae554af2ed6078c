"""Creates the cache's lower tiers from the configuration: host memory, storage, and the copies between them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from graftlm.assembly.device_memory import DeviceMemory, check_room, gib
from graftlm.config import EngineConfig, Problem, origin_of
from graftlm.contracts import KVStorage, StorageContext
from graftlm.errors import ConfigError
from graftlm.execution.block_mover import BlockMover
from graftlm.execution.kv_store import KVStore
from graftlm.memory import TransferQueue
from graftlm.registry import Registry

__all__ = ["TierParts", "assemble_tiers"]


@dataclass(frozen=True, slots=True)
class TierParts:
    """The parts that a cache with lower tiers needs.

    `assemble_tiers` creates them. Each cache gets the queue and `create_storage`, and the runner gets the mover.

    Attributes:
        mover: copies pages between the device and host memory while steps run.
        queue: queue of the copies for the next step.
        create_storage: function that creates a storage from a provider's name, its options and the size of a block in
            bytes.
    """

    mover: BlockMover
    queue: TransferQueue
    create_storage: Callable[[str, Mapping[str, Any], int], KVStorage]


def assemble_tiers(
    config: EngineConfig, registry: Registry, kv: KVStore, fingerprint: Callable[[], bytes], num_replicas: int = 1
) -> TierParts | None:
    """Return the parts for the lower tiers of the configured cache; None if the cache has no lower tiers.

    Args:
        fingerprint: function that returns the fingerprint of the model's weights, which is part of the names of stored
            blocks. The function is called each time a cache is created.
        num_replicas: number of engines that share this machine's memory.
    """
    provider = registry.provider("cache", config.cache.name)
    if not provider.capabilities.tiers:
        return None
    kv_dtype = str(kv.dtype).removeprefix("torch.")
    mover = BlockMover(kv, kv.device)
    host_memory = DeviceMemory.read(torch.device("cpu")).shared_by(num_replicas)

    def allocate(num_blocks: int, pages_per_block: int) -> NDArray[np.uint8]:
        _check_host_room(config, kv, num_blocks, pages_per_block, host_memory)
        try:
            return mover.allocate(num_blocks, pages_per_block)
        except (RuntimeError, MemoryError) as error:
            num_bytes = num_blocks * pages_per_block * kv.page_bytes
            reason = str(error).partition("\n")[0]
            raise ConfigError(
                f"cache.options: {gib(num_bytes)} of host memory cannot be allocated: {reason}"
            ) from error

    queue = TransferQueue(kv.page_bytes, kv_dtype, config.cache.page_size, allocate)

    def create_storage(name: str, options: Mapping[str, Any], block_bytes: int) -> KVStorage:
        context = StorageContext(fingerprint(), block_bytes)
        provider = registry.provider("storage", name)
        checked = registry.options(provider, options, "cache.options.storage.options", config.origins)
        storage: KVStorage = registry.create("storage", provider, checked, context)
        return storage

    return TierParts(mover, queue, create_storage)


def _check_host_room(
    config: EngineConfig, kv: KVStore, num_blocks: int, pages_per_block: int, host_memory: DeviceMemory
) -> None:
    """Check that the blocks of the host tier fit into host memory, on a CPU together with the KV memory.

    Raises:
        ConfigError: the blocks need more memory than the machine has.
    """
    block_bytes = pages_per_block * kv.page_bytes
    kv_bytes = kv.num_bytes if kv.device.type == "cpu" else 0
    options = config.cache.options
    name = "host_tokens" if options.get("host_tokens") is not None else "host_gib"
    largest_bytes = max(0, host_memory.free_bytes - kv_bytes) // block_bytes * block_bytes
    tokens = largest_bytes // kv.page_bytes * config.cache.page_size
    path = ("cache", "options", name)
    kv_text = f" and {gib(kv_bytes)} of KV memory" if kv_bytes else ""
    check_room(
        num_blocks * block_bytes + kv_bytes,
        host_memory,
        str(Problem(path, "", origin_of(path, config.origins))),
        f"{num_blocks:,} blocks in host memory{kv_text}",
        f"{tokens:,}" if name == "host_tokens" else f"{int(largest_bytes / (1 << 30) * 100) / 100:g}",
    )
