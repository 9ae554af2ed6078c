"""Channels over real sockets."""

import threading
import time

import pytest
import zmq

from graftlm.processes.channels import AsyncInbox, Inbox, Outbox
from graftlm.processes.messages import Call, MessageError, Shutdown


@pytest.fixture
def endpoint(tmp_path):
    return f"ipc://{tmp_path}/s"


def test_messages_arrive_in_order(endpoint):
    inbox, outbox = Inbox(endpoint), Outbox(endpoint)
    for i in range(1000):
        outbox.send(Call(call_id=i, name="n"))
    received = []
    while len(received) < 1000:
        received += inbox.receive(5.0)
    assert [message.call_id for message in received] == list(range(1000))
    outbox.close()
    inbox.close()


def test_sending_never_blocks_even_without_a_receiver(endpoint):
    outbox = Outbox(endpoint)
    for i in range(5000):
        outbox.send(Call(call_id=i, name="n"))
    outbox.close(deliver=False)


def test_receive_without_waiting_returns_at_once(endpoint):
    inbox = Inbox(endpoint)
    assert list(inbox.receive(0.0)) == []
    inbox.close()


def test_receive_returns_after_its_timeout(endpoint):
    inbox = Inbox(endpoint)
    assert list(inbox.receive(0.01)) == []
    inbox.close()


def test_a_wake_ends_the_wait_before_or_during_it(endpoint):
    inbox = Inbox(endpoint)
    inbox.wake()
    assert list(inbox.receive(None)) == []
    threading.Timer(0.05, inbox.wake).start()
    assert list(inbox.receive(None)) == []
    inbox.close()


def test_many_wakes_count_as_one_and_none_is_lost(endpoint):
    inbox = Inbox(endpoint)
    for _ in range(100_000):
        inbox.wake()
    start = time.monotonic()
    while time.monotonic() - start < 60 and list(inbox.receive(0.001)) == []:
        if not zmq.select([inbox._wake_end], [], [], 0)[0]:
            break
    inbox.wake()
    assert list(inbox.receive(None)) == []
    inbox.close()


def test_a_malformed_message_is_an_error_and_the_next_one_is_read(endpoint):
    inbox, outbox = Inbox(endpoint), Outbox(endpoint)
    outbox._socket.send(b"nonsense")
    outbox.send(Shutdown())
    with pytest.raises(MessageError):
        list(inbox.receive(5.0))
    assert [type(message) for message in inbox.receive(5.0)] == [Shutdown]
    outbox.close()
    inbox.close()


async def test_an_event_loop_can_receive(endpoint):
    inbox, outbox = AsyncInbox(endpoint), Outbox(endpoint)
    outbox.send(Shutdown())
    assert isinstance(await inbox.receive(), Shutdown)
    outbox.close()
    inbox.close()
