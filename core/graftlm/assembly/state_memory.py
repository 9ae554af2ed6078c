"""Determines the number of slots for recurrent states, and refuses settings that do not support such states."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from graftlm.assembly.device_memory import gib
from graftlm.config import EngineConfig
from graftlm.contracts import StateLayer
from graftlm.errors import ConfigError
from graftlm.execution.state_store import StateStore
from graftlm.registry import Registry, configured_drafters

__all__ = ["StateMemory", "check_states_supported", "size_states"]

_logger = logging.getLogger(__name__)

#: Largest number of snapshots per row, and largest share of the KV budget for snapshots, without a configured number.
_SNAPSHOTS_PER_ROW: Final = 8
_SNAPSHOT_SHARE: Final = 1 / 4


@dataclass(frozen=True, slots=True)
class StateMemory:
    """The slots for recurrent states.

    Attributes:
        num_rows: number of slots of running requests, one for each.
        num_snapshots: number of slots for stored states.
        slot_bytes: size of a slot in bytes, in all layers.
    """

    num_rows: int
    num_snapshots: int
    slot_bytes: int

    @property
    def num_slots(self) -> int:
        """Number of all slots, including that of the initial state."""
        return 1 + self.num_rows + self.num_snapshots

    @property
    def num_bytes(self) -> int:
        """Size of all slots in bytes."""
        return self.num_slots * self.slot_bytes


def check_states_supported(config: EngineConfig, registry: Registry, layers: Sequence[StateLayer]) -> None:
    """Refuse a configuration that does not support recurrent states, if the model has such states.

    Raises:
        ConfigError: the cache or a setting does not support such models.
    """
    if not layers:
        return
    name = config.cache.name
    if not registry.provider("cache", name).capabilities.state:
        raise ConfigError(
            f"cache.name is {name}, which does not support models with a recurrent state. Set cache.name: radix"
        )
    drafters = [provider.name for provider in configured_drafters(config, registry)]
    if drafters:
        raise ConfigError(
            f"speculation.drafter selects {', '.join(drafters)}, but this model has a recurrent state, which cannot "
            "return to the state before rejected drafts. Set speculation.drafter: none"
        )
    if config.grammar.jump_forward == "exact":
        raise ConfigError(
            "grammar.jump_forward is exact, which verifies drafts, but this model has a recurrent state, which cannot "
            "return to the state before rejected drafts. Set grammar.jump_forward: fast"
        )


def size_states(
    config: EngineConfig, registry: Registry, layers: Sequence[StateLayer], budget_bytes: int
) -> StateMemory | None:
    """Return the numbers of slots; None if the model has no recurrent state.

    Args:
        budget_bytes: memory for keys, values and states together.

    Raises:
        ConfigError: the states of all running requests do not fit.
    """
    slot_bytes = StateStore.bytes_per_slot(layers)
    if slot_bytes == 0:
        return None
    num_rows = config.scheduling.max_running_requests
    rows_bytes = (1 + num_rows) * slot_bytes
    if rows_bytes > budget_bytes:
        raise ConfigError(
            f"scheduling.max_running_requests is {num_rows}: the recurrent states of as many requests need "
            f"{gib(rows_bytes)}, but only {gib(budget_bytes)} are available. The largest value that fits is "
            f"{max(0, budget_bytes // slot_bytes - 1)}"
        )
    num_snapshots = config.memory.state_snapshots
    if not registry.provider("cache", config.cache.name).capabilities.reuses:
        num_snapshots = 0
    elif num_snapshots is None:
        fitting = int((budget_bytes - rows_bytes) * _SNAPSHOT_SHARE) // slot_bytes
        num_snapshots = min(_SNAPSHOTS_PER_ROW * num_rows, fitting)
    memory = StateMemory(num_rows, num_snapshots, slot_bytes)
    _logger.info(
        "recurrent states: %s bytes per state, %d for running requests and %d snapshots, %s",
        f"{slot_bytes:,}", num_rows, num_snapshots, gib(memory.num_bytes),
    )  # fmt: skip
    return memory
