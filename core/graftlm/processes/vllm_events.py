"""Publishing of a replica's prefix cache events over ZeroMQ in vLLM's format, with replay.

A message on the PUB socket has three frames: the topic, the sequence number as 8 bytes (big-endian), and a MessagePack
array `[time, events, replica]`. An event is a map whose key "type" names one of the structs below.

A reader asks for missed messages on the ROUTER socket: a REQ or DEALER socket sends the first sequence number that it
needs, as 8 bytes. The answers have an empty delimiter, then the three frames of each buffered message from this number
on. The last answer has an empty topic and the sequence number -1.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Final

import msgspec
import zmq

from graftlm.errors import ConfigError
from graftlm.hookspecs import hookimpl
from graftlm.lora.adapters import split_namespace
from graftlm.records import CacheEvent
from graftlm.routing import BlockChange, BlockLedger

__all__ = ["AllBlocksCleared", "BlockRemoved", "BlockStored", "EventBatch", "VllmEventPublisher"]

logger = logging.getLogger(__name__)

#: Name of the device's memory in events.
_MEDIUM: Final = "GPU"

#: Maximum number of messages that are kept for replay.
_KEPT_MESSAGES: Final = 10_000

#: Maximum number of messages that are queued for a slow reader. A subscriber then misses messages.
_QUEUED_MESSAGES: Final = 500

#: Time in ms after which the thread looks whether the publisher is closed.
_POLL_MS: Final = 200

#: Time in ms after which a replay to a slow reader is ended.
_REPLAY_TIMEOUT_MS: Final = 5000

_END_SEQ: Final = (-1).to_bytes(8, "big", signed=True)


class _Event(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag=True):
    """The base class of events."""


class BlockStored(_Event, frozen=True, kw_only=True):
    """Consecutive blocks that were stored.

    Attributes:
        block_hashes: a 64-bit number for each block; equal numbers mean equal blocks after equal prefixes.
        parent_block_hash: hash of the block before the first block; None at the start of a prompt.
        token_ids: the tokens of all blocks.
        block_size: number of tokens in a block.
        lora_id: always None; `lora_name` identifies the adapter.
        medium: always "GPU".
        lora_name: name of the adapter, or its digest if it is no longer loaded; None without an adapter.
        extra_keys: for each block, the values besides tokens that its hash depends on, as in vLLM: the adapter's name,
            and in the first block of a prompt the cache salt. None if no block has any.
    """

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[list[str] | None] | None = None


class BlockRemoved(_Event, frozen=True, kw_only=True):
    """Blocks that were evicted."""

    block_hashes: list[int]
    medium: str | None


class AllBlocksCleared(_Event, frozen=True, kw_only=True):
    """The cache is empty."""


class EventBatch(msgspec.Struct, frozen=True, array_like=True):
    """The payload of a message.

    Attributes:
        ts: Unix time in seconds.
        events: the events, oldest first.
        data_parallel_rank: number of the replica.
    """

    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


class VllmEventPublisher:
    """A plugin that collects the cache's events through a hook, and publishes the events of each step as one batch.

    Publishing does not block. A thread answers requests for replay. The first message of a process says that its cache
    is empty.

    Args:
        endpoint: address of the PUB socket.
        replay_endpoint: address of the ROUTER socket; None: no replay.
        topic: the first frame of each message.
        block_tokens: number of tokens in a block, a multiple of the page size.
        replica: number of the replica.
        replay_bytes: maximum size of the messages that are kept for replay.

    Attributes:
        next_seq: sequence number of the next message.
        adapter_name: function from an adapter's digest to its name; None if it is not loaded.

    Raises:
        ConfigError: an address cannot be bound.
    """

    def __init__(
        self,
        endpoint: str,
        replay_endpoint: str | None,
        topic: str,
        block_tokens: int,
        replica: int,
        replay_bytes: int,
    ) -> None:
        self.next_seq = 0
        self.adapter_name: Callable[[str], str | None] = lambda digest: None
        self._topic = topic.encode()
        self._block_tokens = block_tokens
        self._replica = replica
        self._replay_bytes = replay_bytes
        self._ledger = BlockLedger(block_tokens)
        self._changes = [BlockChange("cleared")]
        self._encoder = msgspec.msgpack.Encoder()
        self._lock = threading.Lock()  # protects the two attributes below
        self._buffer: deque[tuple[int, bytes]] = deque()
        self._buffered_bytes = 0
        self._socket = _bound(zmq.PUB, endpoint, "endpoint")
        self._keeps = replay_endpoint is not None
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        if replay_endpoint is not None:
            self._thread = self._start_replay(replay_endpoint)
        logger.info("cache events are published on %s in vLLM's format", endpoint)

    def _start_replay(self, endpoint: str) -> threading.Thread:
        try:
            router = _bound(zmq.ROUTER, endpoint, "replay_endpoint")
        except ConfigError:
            self._socket.close(linger=0)
            raise
        thread = threading.Thread(target=self._serve, args=(router,), name="graftlm-kv-replay", daemon=True)
        thread.start()
        return thread

    def close(self) -> None:
        """Close the sockets, and end the thread."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join()
        self._socket.close(linger=0)

    @hookimpl
    def cache_event(self, event: CacheEvent) -> None:
        """Collect an event. This method is a hook."""
        change = self._ledger.apply(event)
        if change is not None:
            self._changes.append(change)

    def publish(self) -> None:
        """Send the collected events as one batch, if there are any."""
        if not self._changes:
            return
        batch = EventBatch(time.time(), [self._event(change) for change in self._changes], self._replica)
        self._changes.clear()
        payload, seq = self._encoder.encode(batch), self.next_seq
        self.next_seq += 1
        if self._keeps:
            self._keep(seq, payload)
        self._socket.send_multipart([self._topic, seq.to_bytes(8, "big"), payload], zmq.NOBLOCK)

    def _event(self, change: BlockChange) -> BlockStored | BlockRemoved | AllBlocksCleared:
        if change.kind == "cleared":
            return AllBlocksCleared()
        if change.kind == "removed":
            return BlockRemoved(block_hashes=change.digests, medium=_MEDIUM)
        salt, digest = split_namespace(change.namespace)
        adapter = None if digest is None else self.adapter_name(digest) or digest
        keys = [] if adapter is None else [adapter]
        first = [*keys, salt] if salt and change.parent is None else keys
        extra_keys = [first or None, *[keys or None] * (len(change.digests) - 1)]
        return BlockStored(
            block_hashes=change.digests,
            parent_block_hash=change.parent,
            token_ids=change.token_ids.tolist(),
            block_size=self._block_tokens,
            lora_id=None,
            medium=_MEDIUM,
            lora_name=adapter,
            extra_keys=extra_keys if any(extra_keys) else None,
        )

    def _keep(self, seq: int, payload: bytes) -> None:
        """Keep a message for replay, and drop the oldest messages beyond the limits."""
        with self._lock:
            self._buffer.append((seq, payload))
            self._buffered_bytes += len(payload)
            while len(self._buffer) > _KEPT_MESSAGES or (self._buffered_bytes > self._replay_bytes and self._buffer):
                self._buffered_bytes -= len(self._buffer.popleft()[1])

    def _serve(self, router: zmq.Socket[bytes]) -> None:
        """Answer requests for replay until `close`."""
        while not self._closing.is_set():
            if not router.poll(_POLL_MS):
                continue
            try:
                frames = router.recv_multipart()
                if len(frames) != 3 or len(frames[2]) != 8:
                    logger.warning("a request for replay has %d frames; expected a sequence number", len(frames))
                    continue
                self._replay(router, frames[0], int.from_bytes(frames[2], "big"))
            except zmq.ZMQError as error:  # such as a reader that has disconnected
                logger.warning("a replay failed: %s", error)
        router.close(linger=0)

    def _replay(self, router: zmq.Socket[bytes], reader: bytes, first_seq: int) -> None:
        with self._lock:
            kept = [message for message in self._buffer if message[0] >= first_seq]
        for seq, payload in kept:
            router.send_multipart([reader, b"", self._topic, seq.to_bytes(8, "big"), payload])
        router.send_multipart([reader, b"", b"", _END_SEQ, b""])


def _bound(kind: int, endpoint: str, field: str) -> zmq.Socket[Any]:
    socket: zmq.Socket[Any] = zmq.Context.instance().socket(kind)
    socket.set_hwm(_QUEUED_MESSAGES)
    if kind == zmq.ROUTER:
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a full queue waits, and is not dropped
        socket.setsockopt(zmq.SNDTIMEO, _REPLAY_TIMEOUT_MS)
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        socket.close(linger=0)
        raise ConfigError(
            f"server.kv_events.{field}: cannot publish on {endpoint}: {error}. Set another address."
        ) from error
    return socket
