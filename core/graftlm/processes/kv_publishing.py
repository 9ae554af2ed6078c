"""The choice of the publisher of a replica's prefix cache events."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from graftlm.processes.kv_events import KVEventPublisher, replica_endpoint
from graftlm.processes.trace_lines import trace_block_tokens
from graftlm.processes.vllm_events import VllmEventPublisher
from graftlm.records import CacheEvent

if TYPE_CHECKING:
    from graftlm.config import KVEventSettings

__all__ = ["EventPublisher", "make_publisher"]


class EventPublisher(Protocol):
    """A plugin that collects the cache's events, and publishes them after each step.

    Attributes:
        next_seq: sequence number of the next message.
        adapter_name: function from an adapter's digest to its name; None if it is not loaded.
    """

    next_seq: int
    adapter_name: Callable[[str], str | None]

    def cache_event(self, event: CacheEvent) -> None:
        """Collect an event."""
        ...

    def publish(self) -> None:
        """Send the collected events as one batch, if there are any."""
        ...


def make_publisher(settings: KVEventSettings, process: str, replica: int, page_size: int) -> EventPublisher | None:
    """Return the publisher of a replica; None if changes are not published.

    Args:
        process: name of the replica's process.
        replica: number of the replica.
        page_size: number of tokens in a page. In the format `vllm`, a block has one page, but at least 16 tokens.

    Raises:
        ConfigError: an address cannot be bound.
    """
    if settings.endpoint is None:
        return None
    endpoint = replica_endpoint(settings.endpoint, replica)
    if settings.format == "graftlm":
        return KVEventPublisher(endpoint, process)
    replay = None if settings.replay_endpoint is None else replica_endpoint(settings.replay_endpoint, replica)
    block_tokens = trace_block_tokens(page_size)
    return VllmEventPublisher(endpoint, replay, settings.topic, block_tokens, replica, settings.replay_mib << 20)
