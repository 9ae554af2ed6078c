"""Events are parsed wherever the bytes are split."""

import pytest

from graftlm.lang.backends.server_events import server_events

BYTES = b': hello\n\ndata: {"text": "a\\n"}\n\ndata:{"text":"b"}\r\n\r\ndata: [DONE]\n\ndata: {"text": "late"}\n\n'


@pytest.mark.parametrize("size", [1, 2, 7, len(BYTES)])
async def test_events_are_parsed_from_pieces_of_any_size(size):
    async def chunks():
        for at in range(0, len(BYTES), size):
            yield BYTES[at : at + size]

    assert [event async for event in server_events(chunks())] == [{"text": "a\n"}, {"text": "b"}]
