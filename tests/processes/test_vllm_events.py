"""A reader of vLLM's events holds the blocks of the replica's cache, also after missed messages."""

import random

import msgspec
import numpy as np
import pytest
import zmq

from graftlm.config import EngineConfig, KVEventSettings
from graftlm.contracts import CacheContext, PrefixKey
from graftlm.errors import ConfigError
from graftlm.lora.adapters import prefix_namespace, split_namespace
from graftlm.processes.kv_publishing import make_publisher
from graftlm.records import CacheEvent
from graftlm.testing import OldestAccessFirst
from graftlm.testing.vllm_reader import VllmEventReader
from graftlm_cache.radix import RadixCache

TOKENS = np.arange(48, dtype=np.int32)


@pytest.fixture
def make(tmp_path):
    """Return a function that makes a publisher, and returns it with its two addresses."""

    made = []

    def make(page_size=16, **settings):
        endpoint, replay = f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay"
        settings = KVEventSettings(endpoint=endpoint, replay_endpoint=replay, format="vllm", **settings)
        made.append(make_publisher(settings, "scheduler-0", 0, page_size))
        return made[-1], endpoint, replay

    yield make
    for publisher in made:
        publisher.close()


def whole_blocks(cache, block_tokens):
    """Return (salt, tokens) of each prefix of whole blocks that the cache holds."""
    prefixes, found = {}, set()
    for node in cache.walk():
        tokens = prefixes[node.node_id] = (*prefixes.get(node.parent_id, ()), *node.token_ids.tolist())
        for end in range(block_tokens, len(tokens) + 1, block_tokens):
            found.add(((node.namespace,) if node.namespace else (), tokens[:end]))
    return found


@pytest.mark.parametrize(("page_size", "block_tokens"), [(1, 16), (16, 16), (32, 32)])
def test_a_late_reader_replays_and_holds_the_blocks_of_the_cache(make, page_size, block_tokens):
    publisher, endpoint, replay = make(page_size)
    cache = RadixCache(CacheContext(page_size, OldestAccessFirst(), lambda: 0.0, on_event=publisher.cache_event))
    draw = random.Random(page_size)

    def change():
        if draw.random() < 0.8:
            tokens = np.full(draw.randrange(1, 150), 7, dtype=np.int32)
            tokens[draw.randrange(len(tokens)) :] = draw.randrange(3)
            key = PrefixKey(tokens, draw.choice(["", "tenant"]))
            handle = cache.match(key).handle
            cache.insert(key, np.arange(len(tokens) // page_size - handle.num_pages, dtype=np.int32), handle)
        else:
            cache.evict(draw.randrange(1, 100 // page_size + 2))
        publisher.publish()

    for _ in range(30):
        change()
    with VllmEventReader(endpoint, replay) as reader:
        reader.catch_up()
        assert set(reader.prefixes.values()) == whole_blocks(cache, block_tokens)
        num_replayed = reader.num_replayed
        for _ in range(30):
            change()
        while reader.next_seq < publisher.next_seq:  # some messages may precede the subscription
            if not reader.read(timeout_s=0.2):
                reader.catch_up()
        assert set(reader.prefixes.values()) == whole_blocks(cache, block_tokens)
        assert len(reader.prefixes) == len(set(reader.prefixes.values()))
        assert num_replayed > 10
        cache.reset()
        publisher.publish()
        reader.catch_up()
        assert reader.prefixes == {}


def test_the_frames_are_those_of_vllm(make):
    publisher, endpoint, _ = make(topic="kv@pod@model")
    subscriber = zmq.Context.instance().socket(zmq.SUB)
    subscriber.connect(endpoint)
    subscriber.subscribe(b"kv@pod")
    while not subscriber.poll(50):
        publisher.cache_event(CacheEvent("cleared", 0))
        publisher.publish()
    while subscriber.poll(50):
        subscriber.recv_multipart()
    publisher.adapter_name = {"9f3c": "sql"}.get
    publisher.cache_event(CacheEvent("stored", 32, 1, None, prefix_namespace("s", "9f3c"), TOKENS[:32]))
    publisher.cache_event(CacheEvent("stored", 16, 2, 1, prefix_namespace("s", "9f3c"), TOKENS[32:]))
    publisher.cache_event(CacheEvent("removed", 16, 2))
    publisher.publish()
    topic, seq, payload = subscriber.recv_multipart()
    subscriber.close(linger=0)
    assert (topic, int.from_bytes(seq, "big")) == (b"kv@pod@model", publisher.next_seq - 1)
    _, (first, second, removed), rank = msgspec.msgpack.decode(payload)
    assert rank == 0
    assert list(first) == [
        "type",
        "block_hashes",
        "parent_block_hash",
        "token_ids",
        "block_size",
        "lora_id",
        "medium",
        "lora_name",
        "extra_keys",
    ]
    assert (first["type"], first["token_ids"], first["block_size"]) == ("BlockStored", list(range(32)), 16)
    assert (first["parent_block_hash"], first["lora_name"], first["medium"]) == (None, "sql", "GPU")
    assert first["extra_keys"] == [["sql", "s"], ["sql"]]
    assert second["parent_block_hash"] == first["block_hashes"][-1]
    assert second["extra_keys"] == [["sql"]]
    assert removed == {"type": "BlockRemoved", "block_hashes": second["block_hashes"], "medium": "GPU"}


def test_the_buffer_is_limited_and_wrong_requests_are_ignored(make):
    publisher, _, replay = make(replay_mib=1)
    tokens = np.arange(160_000, dtype=np.int32)
    for node in range(4):
        publisher.cache_event(CacheEvent("stored", len(tokens), node, None, f"n{node}", tokens))
        publisher.publish()
    dealer = zmq.Context.instance().socket(zmq.DEALER)
    dealer.connect(replay)
    dealer.send_multipart([b"", b"short"])
    dealer.send_multipart([b"", (0).to_bytes(8, "big")])
    numbers = []
    while not numbers or numbers[-1] != -1:
        assert dealer.poll(5000)
        numbers.append(int.from_bytes(dealer.recv_multipart()[2], "big", signed=True))
    dealer.close(linger=0)
    assert numbers == [3, -1]


@pytest.mark.parametrize("field", ["endpoint", "replay_endpoint"])
def test_an_address_that_cannot_be_bound_is_an_error_of_the_configuration(tmp_path, field):
    addresses = {name: f"ipc://{tmp_path}/{name}" for name in ("endpoint", "replay_endpoint")}
    settings = KVEventSettings(format="vllm", **addresses | {field: "ipc:///nowhere/events"})
    with pytest.raises(ConfigError, match=rf"^server\.kv_events\.{field}: cannot publish on ipc:///nowhere/events: "):
        make_publisher(settings, "scheduler-0", 0, 16)


def test_a_replay_needs_an_endpoint_and_vllms_format():
    replay = {"replay_endpoint": "tcp://127.0.0.1:2"}
    for settings in (replay, {"endpoint": "tcp://127.0.0.1:1", **replay}):
        with pytest.raises(ConfigError, match="replay_endpoint needs `endpoint` and the format 'vllm'"):
            EngineConfig.load({"server": {"kv_events": settings}})


@pytest.mark.parametrize("salt", ["", "a", "lora:x", "salt:", "a:b"])
@pytest.mark.parametrize("adapter", [None, "9f3c"])
def test_a_namespace_is_split_into_salt_and_adapter(salt, adapter):
    assert split_namespace(prefix_namespace(salt, adapter)) == (salt, adapter)
