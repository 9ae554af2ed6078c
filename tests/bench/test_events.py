"""Events are found wherever the bytes are split."""

import pytest

from graftlm.bench.events import EventSplitter

STREAM = (
    b': hello\n\ndata: {"a": 1}\n\nevent: x\ndata:{"b": 2}\r\n\r\ndata: one\ndata: two\n\ndata: [DONE]\n\ndata: cut off'
)
EVENTS = [b'{"a": 1}', b'{"b": 2}', b"one\ntwo", b"[DONE]"]


@pytest.mark.parametrize("size", [1, 2, 7, 23, 1000])
def test_events_do_not_depend_on_how_bytes_arrive(size):
    splitter = EventSplitter()
    pieces = [STREAM[i : i + size] for i in range(0, len(STREAM), size)]
    assert [event for piece in pieces for event in splitter.feed(piece)] == EVENTS


def test_an_event_is_complete_with_its_last_byte():
    splitter = EventSplitter()
    assert splitter.feed(b"data: x\n") == []
    assert splitter.feed(b"\n") == [b"x"]
