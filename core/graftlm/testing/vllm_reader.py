"""A reader of cache events in vLLM's format, as routers and indexers implement it."""

from types import TracebackType
from typing import Any, Self

import msgspec
import zmq

__all__ = ["VllmEventReader"]


class _Event(msgspec.Struct, tag=True, omit_defaults=True):
    """The base class of events: a map with the key "type"."""


class BlockStored(_Event):
    """vLLM's struct, with the fields that a reader needs; further keys are ignored."""

    block_hashes: list[int | bytes]
    parent_block_hash: int | bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[list[Any] | None] | None = None


class BlockRemoved(_Event):
    """vLLM's struct."""

    block_hashes: list[int | bytes]
    medium: str | None


class AllBlocksCleared(_Event):
    """vLLM's struct."""


class KVEventBatch(msgspec.Struct, array_like=True):
    """vLLM's struct: an array."""

    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


class VllmEventReader:
    """Reads the events of one replica, asks for messages that it has missed, and holds the replica's blocks.

    Args:
        endpoint: address of the replica's PUB socket.
        replay_endpoint: address of its ROUTER socket.
        topic: the topic to subscribe to.

    Attributes:
        prefixes: hash of a block -> (values besides tokens, all tokens up to the end of the block).
        next_seq: sequence number of the next message.
        num_replayed: number of messages that were replayed.
    """

    def __init__(self, endpoint: str, replay_endpoint: str, topic: str = "") -> None:
        context: zmq.Context[Any] = zmq.Context.instance()
        self.prefixes: dict[int | bytes, tuple[tuple[Any, ...], tuple[int, ...]]] = {}
        self.next_seq = 0
        self.num_replayed = 0
        self._decoder = msgspec.msgpack.Decoder(KVEventBatch)
        self._live: zmq.Socket[bytes] = context.socket(zmq.SUB)
        self._live.connect(endpoint)
        self._live.subscribe(topic.encode())
        self._replay: zmq.Socket[bytes] = context.socket(zmq.DEALER)
        self._replay.connect(replay_endpoint)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.close(linger=0)
        self._replay.close(linger=0)

    def catch_up(self, timeout_s: float = 5.0) -> None:
        """Apply all messages from `next_seq` on that the replica has kept.

        Raises:
            TimeoutError: the replica does not answer in time.
        """
        self._replay.send_multipart([b"", self.next_seq.to_bytes(8, "big")])
        while True:
            if not self._replay.poll(int(timeout_s * 1000)):
                raise TimeoutError("the replica did not answer the request for replay")
            _, _, seq, payload = self._replay.recv_multipart()
            number = int.from_bytes(seq, "big", signed=True)
            if number == -1:
                return
            self.num_replayed += 1
            self._apply(number, payload)

    def read(self, timeout_s: float = 0.0) -> int:
        """Apply the messages that have arrived, and return their number. Gaps are filled by replay.

        Args:
            timeout_s: maximum wait for the first message.
        """
        num_read = 0
        while self._live.poll(0 if num_read else int(timeout_s * 1000)):
            _, seq, payload = self._live.recv_multipart()
            num_read += 1
            number = int.from_bytes(seq, "big")
            if number > self.next_seq:
                self.catch_up()
            self._apply(number, payload)
        return num_read

    def _apply(self, seq: int, payload: bytes) -> None:
        """Apply a message, unless it was applied already."""
        if seq < self.next_seq:
            return
        assert seq == self.next_seq, f"message {self.next_seq} is missing, the next is {seq}"
        self.next_seq += 1
        for event in self._decoder.decode(payload).events:
            if isinstance(event, AllBlocksCleared):
                self.prefixes.clear()
            elif isinstance(event, BlockRemoved):
                for name in event.block_hashes:
                    del self.prefixes[name]
            else:
                self._store(event)

    def _store(self, event: BlockStored) -> None:
        size = event.block_size
        assert len(event.token_ids) == size * len(event.block_hashes), "token_ids are not the blocks' tokens"
        keys = event.extra_keys or [None] * len(event.block_hashes)
        named: tuple[Any, ...] = ()
        tokens: tuple[int, ...] = ()
        if event.parent_block_hash is not None:
            named, tokens = self.prefixes[event.parent_block_hash]
        for number, (name, extra) in enumerate(zip(event.block_hashes, keys, strict=True)):
            assert name not in self.prefixes, "a block is stored twice"
            tokens = tokens + tuple(event.token_ids[number * size : (number + 1) * size])
            named = named or tuple(extra or ())
            self.prefixes[name] = (named, tokens)
