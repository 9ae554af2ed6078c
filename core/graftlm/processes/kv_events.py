"""Publishing of a replica's prefix cache events over ZeroMQ, for external routers and indexers."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
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

#: Maximum number of batches that are queued for a slow subscriber. Further batches are dropped, which the subscriber
#: can detect by `seq`. Each subscriber has its own queue. A batch of long prompts can have hundreds of kilobytes.
_QUEUED_BATCHES = 500


class WireCacheEvent(msgspec.Struct, frozen=True, omit_defaults=True):
    """The form of a `graftlm.records.CacheEvent` in a message. `token_ids` are int32, little-endian."""

    kind: str
    num_tokens: int
    node_id: int | None = None
    parent_id: int | None = None
    namespace: str = ""
    token_ids: bytes = b""


class KVEventBatch(msgspec.Struct, frozen=True):
    """The events since the previous batch, in order. It is the second frame of a message, a MessagePack map.

    Attributes:
        version: version of this format.
        replica: name of the replica's process.
        seq: number of the batch, which increases by 1. If a number is missing or is smaller than the previous one, the
            subscriber has missed events, and has to read the whole cache again (`GET /cache_snapshot`).
        time_s: Unix time in seconds.
        events: the events, oldest first.
    """

    version: int
    replica: str
    seq: int
    time_s: float
    events: list[WireCacheEvent]


class KVEventPublisher:
    """A plugin that collects the cache's events through a hook, and publishes the events of each step as one batch.

    Publishing does not block, so subscribers cannot delay a step.
    """

    def __init__(self, endpoint: str, replica: str) -> None:
        """Bind the address.

        Raises:
            ConfigError: the address cannot be bound.
        """
        self._replica = replica
        self._events: list[CacheEvent] = []
        self._encoder = msgspec.msgpack.Encoder()
        self.next_seq = 0
        self.adapter_name: Callable[[str], str | None] = lambda digest: None  # not used in this format
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUB)
        self._socket.set_hwm(_QUEUED_BATCHES)
        try:
            self._socket.bind(endpoint)
        except zmq.ZMQError as error:
            self._socket.close(linger=0)
            raise ConfigError(
                f"server.kv_events.endpoint: cannot publish on {endpoint}: {error}. Set another address."
            ) from error
        logger.info("cache events are published on %s", endpoint)

    @hookimpl
    def cache_event(self, event: CacheEvent) -> None:
        """Collect an event. This method is a hook."""
        self._events.append(event)

    def publish(self) -> None:
        """Send the collected events as one batch, if there are any."""
        if not self._events:
            return
        events = [_wire_event(event) for event in self._events]
        self._events.clear()
        batch = KVEventBatch(1, self._replica, self.next_seq, time.time(), events)
        self.next_seq += 1
        self._socket.send_multipart([TOPIC, self._encoder.encode(batch)], zmq.NOBLOCK)


def replica_endpoint(address: str, index: int) -> str:
    """Return the address of the replica `index`.

    In a TCP address, the index is added to the port. To other addresses, "-" and the index are appended if it is not 0.
    """
    if not address.startswith("tcp://"):
        return f"{address}-{index}" if index else address
    host, _, port = address.rpartition(":")
    return f"{host}:{int(port) + index}"


def _wire_event(event: CacheEvent) -> WireCacheEvent:
    tokens: Any = event.token_ids
    return WireCacheEvent(
        event.kind,
        event.num_tokens,
        event.node_id,
        event.parent_id,
        event.namespace,
        b"" if tokens is None else tokens.astype("<i4").tobytes(),
    )
