import socket

import httpx2
import msgspec
import numpy as np
import pytest
import zmq

from graftlm.config import EngineConfig
from graftlm.errors import ConfigError
from graftlm.processes.kv_events import TOPIC, KVEventBatch, replica_endpoint
from graftlm.records import CacheEvent
from graftlm.testing.event_mirror import EventMirror, MirroredNode
from graftlm.testing.server_process import ServerProcess, wait_until
from graftlm.testing.vllm_reader import VllmEventReader


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="module")
def published():
    address = f"tcp://127.0.0.1:{free_port()}"
    with ServerProcess({"memory": {"kv_tokens": 4096}, "server": {"kv_events": address}}) as server:
        subscriber = zmq.Context.instance().socket(zmq.SUB)
        subscriber.connect(address)
        subscriber.subscribe(TOPIC)
        with httpx2.Client(base_url=server.url, timeout=60) as client:
            yield client, subscriber
        subscriber.close(linger=0)


def batches(subscriber, timeout_s=0.0):
    """Return the batches that have arrived; wait at most `timeout_s` for the first one."""
    arrived = []
    while subscriber.poll(0 if arrived else int(timeout_s * 1000)):
        arrived.append(msgspec.msgpack.decode(subscriber.recv_multipart()[1], type=KVEventBatch))
    return arrived


def generate(client, text):
    body = {"text": text, "sampling_params": {"max_new_tokens": 4, "temperature": 0}}
    assert client.post("/generate", json=body).status_code == 200


def snapshot(client):
    (replica,) = client.get("/cache_snapshot").json()["replicas"]
    return replica


def mirror_of(replica):
    mirror = EventMirror()
    for node in replica["nodes"]:
        token_ids = np.array(node["token_ids"], dtype=np.int32)
        mirror.nodes[node["id"]] = MirroredNode(node["parent"], node["namespace"], token_ids)
        if node["parent"] is not None:
            mirror.nodes[node["parent"]].children.add(node["id"])
    return mirror


def replay(mirror, batch):
    for event in batch.events:
        tokens = np.frombuffer(event.token_ids, "<i4")
        mirror(CacheEvent(event.kind, event.num_tokens, event.node_id, event.parent_id, event.namespace, tokens))


def content(mirror):
    return {i: (node.parent_id, node.namespace, node.token_ids.tolist()) for i, node in mirror.nodes.items()}


def test_an_indexer_that_connects_late_rebuilds_the_same_tree(published):
    client, subscriber = published

    def hears():
        generate(client, f"knock {len(batches(subscriber))}")
        client.post("/flush_cache")
        return bool(batches(subscriber, timeout_s=1.0))

    wait_until(hears, 20, "the first events")
    generate(client, "A river runs past the mill")
    start = snapshot(client)
    mirror, seq = mirror_of(start), start["next_seq"]
    for text in ("A river runs past the house", "A river runs dry", "Where does the river end?"):
        generate(client, text)
    end = snapshot(client)
    while seq < end["next_seq"]:
        for batch in batches(subscriber, timeout_s=5.0):
            if batch.seq >= start["next_seq"]:
                assert (batch.seq, batch.replica, batch.version) == (seq, "scheduler-0", 1)
                replay(mirror, batch)
                seq += 1
    assert content(mirror) == content(mirror_of(end))
    assert len(mirror.nodes) > 3


@pytest.mark.parametrize(
    ("address", "index", "expected"),
    [
        ("tcp://*:5557", 0, "tcp://*:5557"),
        ("tcp://127.0.0.1:5557", 2, "tcp://127.0.0.1:5559"),
        ("ipc:///run/events", 0, "ipc:///run/events"),
        ("ipc:///run/events", 1, "ipc:///run/events-1"),
    ],
)
def test_every_replica_has_its_own_address(address, index, expected):
    assert replica_endpoint(address, index) == expected


@pytest.mark.full  # tests/processes/test_kv_events.py binds it, test_start.py has an error of the scheduler
def test_an_address_in_use_ends_the_start_with_a_clear_error():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(RuntimeError, match=r"server.kv_events.endpoint: cannot publish on tcp://127.0.0.1"):
            ServerProcess({"server": {"kv_events": address}})


@pytest.mark.parametrize("address", ["5557", "tcp://localhost", "http://localhost:1", "", "ipc://", "tcp://h:123456"])
def test_a_malformed_address_is_refused(address):
    with pytest.raises(ConfigError, match="kv_events"):
        EngineConfig.load({"server": {"kv_events": address}})


@pytest.mark.full
def test_a_reader_of_vllms_events_holds_the_trees_of_two_replicas():
    port = free_port()
    settings = {
        "endpoint": f"ipc:///tmp/graftlm-events-{port}",
        "replay_endpoint": f"ipc:///tmp/graftlm-replay-{port}",
        "format": "vllm",
        "topic": "kv@pod@demo",
    }
    config = {
        "memory": {"kv_tokens": 1024},
        "parallel": {"data": 2, "routing": "round_robin"},
        "server": {"kv_events": settings},
    }
    with ServerProcess(config) as server, httpx2.Client(base_url=server.url, timeout=60) as client:
        for number in range(24):
            generate(client, f"A river runs past house {number % 5}. " * 8 + str(number))
        for index, replica in enumerate(client.get("/cache_snapshot").json()["replicas"]):
            addresses = [replica_endpoint(settings[name], index) for name in ("endpoint", "replay_endpoint")]
            with VllmEventReader(*addresses, "kv@pod@demo") as reader:
                reader.catch_up()
                assert reader.next_seq == replica["next_seq"]
                assert reader.num_replayed > 3
                assert {tokens for _, tokens in reader.prefixes.values()} == whole_blocks(replica["nodes"])


def whole_blocks(nodes):
    """Return the tokens of each prefix of whole blocks of 16 tokens."""
    prefixes, found = {None: ()}, set()
    for node in nodes:
        tokens = prefixes[node["id"]] = (*prefixes[node["parent"]], *node["token_ids"])
        found |= {tokens[:end] for end in range(16, len(tokens) + 1, 16)}
    return found
