"""Chunks, gaps and times per token are computed from the events of every kind of server."""

from itertools import pairwise

import pytest

from graftlm.bench.answer import Answer
from graftlm.bench.apis import Event

TEXT = Event(has_text=True)
ROLE = Event()


def count(n, **fields):
    return Event(output_tokens=n, **fields)


@pytest.mark.parametrize(
    ("reads", "moments", "chunk_tokens", "output_tokens", "tpot"),
    [
        pytest.param(
            [(1, [count(1)]), (2, [count(2)]), (4, [count(4)])], [1, 2, 4], [1, 1, 2], 4, 1.0, id="a running count"
        ),
        pytest.param(
            [(1, [count(1), count(2)]), (5, [count(3), count(4)])], [1, 5], [2, 2], 4, 2.0, id="events read together"
        ),
        pytest.param(
            [(0, [ROLE]), (1, [TEXT]), (2, [TEXT]), (3, [TEXT, count(5)]), (4, [])],
            [1, 2, 3],
            None,
            5,
            0.5,
            id="a count only at the end",
        ),
        pytest.param([(1, [TEXT]), (2, [TEXT]), (3, [ROLE])], [1, 2], None, None, None, id="no count at all"),
        pytest.param([(1, [ROLE]), (6, [count(3)])], [6], [3], 3, None, id="nothing to see but the count"),
        pytest.param([(1, [TEXT, TEXT, count(9)])], [1], None, 9, None, id="all at once"),
        pytest.param(
            [(1, [count(1)]), (2, [count(1)]), (3, [count(2)])], [1, 3], [1, 1], 2, 2.0, id="an event without news"
        ),
        pytest.param([(1, [ROLE])], [], [], None, None, id="no token"),
    ],
)
def test_events_that_arrive_together_are_one_chunk(reads, moments, chunk_tokens, output_tokens, tpot):
    answer = Answer()
    for now_s, events in reads:
        answer.add(events, float(now_s))
    assert answer.moments_s == moments
    assert answer.chunk_tokens == chunk_tokens
    assert answer.output_tokens == output_tokens
    assert answer.tpot_s == tpot
    assert answer.gaps_s == [b - a for a, b in pairwise(moments)]


def test_usage_and_the_end_are_kept():
    answer = Answer()
    answer.add([count(1, prompt_tokens=9, cached_tokens=4)], 1.0)
    answer.add([count(2, finish_reason="length"), Event(error="boom")], 2.0)
    assert (answer.prompt_tokens, answer.cached_tokens, answer.output_tokens) == (9, 4, 2)
    assert (answer.finish_reason, answer.error) == ("length", "boom")
