"""The publisher of cache events keeps a limited number of batches for slow subscribers."""

import socket

import numpy as np
import pytest
import zmq

from graftlm.errors import ConfigError
from graftlm.processes.kv_events import TOPIC, KVEventPublisher
from graftlm.records import CacheEvent


def test_at_most_a_few_hundred_batches_are_kept_for_a_slow_subscriber(tmp_path):
    endpoint = f"ipc://{tmp_path}/events"
    publisher = KVEventPublisher(endpoint, "replica")
    subscriber = zmq.Context.instance().socket(zmq.SUB)
    subscriber.set_hwm(1)
    subscriber.subscribe(TOPIC)
    subscriber.connect(endpoint)
    token_ids = np.zeros(16_384, dtype=np.int32)

    def publish():
        publisher.cache_event(CacheEvent("stored", len(token_ids), 1, None, "", token_ids))
        publisher.publish()

    for _ in range(100):  # wait until it has subscribed
        publish()
        if subscriber.poll(100):
            break
    for _ in range(3000):
        publish()
    num_read = 0
    while subscriber.poll(500):
        subscriber.recv_multipart()
        num_read += 1
    assert 1 <= num_read < 1000
    subscriber.close(linger=0)
    publisher._socket.close(linger=0)


def test_an_address_in_use_is_an_error_of_the_configuration():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        endpoint = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ConfigError, match=f"^server.kv_events.endpoint: cannot publish on {endpoint}: "):
            KVEventPublisher(endpoint, "replica")
