import random

import numpy as np
import pytest

from graftlm.cache_sim import Trace, TraceRequest

BLOCK_TOKENS = 16


@pytest.fixture(scope="session")
def chats():
    """A trace of 60 growing chats that share a system prompt of 2 blocks, with 8 turns each, in random order."""
    draw = random.Random(3)
    turns = [chat for chat in range(60) for _ in range(8)]
    draw.shuffle(turns)
    lengths, requests = [draw.randrange(2, 6) for _ in range(60)], []
    for number, chat in enumerate(turns):
        lengths[chat] += draw.randrange(1, 8)
        ids = np.array([0, 1, *(1000 * (chat + 1) + block for block in range(lengths[chat] - 2))], dtype=np.int32)
        tokens = BLOCK_TOKENS * len(ids)
        requests.append(TraceRequest(0.5 * number, ids, tokens, tokens, output_tokens=draw.randrange(1, 30)))
    return Trace("chats", BLOCK_TOKENS, tuple(requests))
