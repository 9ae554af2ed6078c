"""What a replica's prefix cache stores and removes, published over ZeroMQ for routers and indexers outside."""

from __future__ import annotations

import logging
import time
from typing import Any

import msgspec
import zmq

from graftlm.errors import ConfigError
from graftlm.hookspecs import hookimpl
from graftlm.records import CacheEvent

__all__ = ["TOPIC", "KVEventBatch", "KVEventPublisher", "WireCacheEvent", "replica_endpoint"]

logger = logging.getLogger(__name__)

#: The first frame of every message.
TOPIC = b"kv_events"

#: Batches that a slow subscriber may be behind; then it misses some, which it sees by `seq`. A batch of long prompts
#: has hundreds of kilobytes, and each subscriber has a queue of its own.
_QUEUED_BATCHES = 500


class WireCacheEvent(msgspec.Struct, frozen=True, omit_defaults=True):
    """A `graftlm.records.CacheEvent`; `token_ids` are int32, little-endian."""

    kind: str
    num_tokens: int
    node_id: int | None = None
    parent_id: int | None = None
    namespace: str = ""
    token_ids: bytes = b""


class KVEventBatch(msgspec.Struct, frozen=True):
    """What happened since the batch before, in order: the second frame of a message, a MessagePack map.

    Attributes:
        seq: grows by one from batch to batch; one that is missing, or smaller than the last, means that the cache has
            to be read anew (`GET /cache_snapshot`).
        time_s: Unix time.
    """

    version: int
    replica: str
    seq: int
    time_s: float
    events: list[WireCacheEvent]


class KVEventPublisher:
    """Gathers the cache's events, and publishes those of a step together. A plugin: its hook hears them.

    Nobody who listens, or does not, holds up a step.
    """

    def __init__(self, endpoint: str, replica: str) -> None:
        """Bind the address.

        Raises:
            ConfigError: it cannot be bound.
        """
        self._replica = replica
        self._events: list[CacheEvent] = []
        self._encoder = msgspec.msgpack.Encoder()
        self.next_seq = 0
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUB)
        self._socket.set_hwm(_QUEUED_BATCHES)
        try:
            self._socket.bind(endpoint)
        except zmq.ZMQError as error:
            raise ConfigError(f"server.kv_events: cannot publish on {endpoint}: {error}. Choose another.") from error
        logger.info("cache events are published on %s", endpoint)

    @hookimpl
    def cache_event(self, event: CacheEvent) -> None:
        """Take in an event."""
        self._events.append(event)

    def publish(self) -> None:
        """Send what has been gathered."""
        if not self._events:
            return
        events = [_on_the_wire(event) for event in self._events]
        self._events.clear()
        batch = KVEventBatch(1, self._replica, self.next_seq, time.time(), events)
        self.next_seq += 1
        self._socket.send_multipart([TOPIC, self._encoder.encode(batch)], zmq.NOBLOCK)


def replica_endpoint(address: str, index: int) -> str:
    """Return the address of one replica: for TCP its port is higher by the index, else the index is appended."""
    if not address.startswith("tcp://"):
        return f"{address}-{index}" if index else address
    host, _, port = address.rpartition(":")
    return f"{host}:{int(port) + index}"


def _on_the_wire(event: CacheEvent) -> WireCacheEvent:
    tokens: Any = event.token_ids
    return WireCacheEvent(
        event.kind,
        event.num_tokens,
        event.node_id,
        event.parent_id,
        event.namespace,
        b"" if tokens is None else tokens.astype("<i4").tobytes(),
    )
