"""Which requests count as passed over, and when a request is aged."""

import numpy as np
import pytest

from graftlm.scheduling import Request
from graftlm.scheduling.ageing import Ageing
from graftlm.types import SamplingParams


def make(name, arrival_s, priority=0, number=0):
    prompt = np.zeros(1, dtype=np.int32)
    request = Request(name, prompt, SamplingParams(), 1, frozenset(), seed=0, arrival_s=arrival_s, priority=priority)
    request.queue_number = number
    return request


@pytest.mark.parametrize(
    ("admitted", "passed"),
    [
        ((1.0, 0), ["early"]),
        ((2.5, 0), ["early", "middle"]),
        ((9.0, 0), ["early", "late", "middle"]),
        ((9.0, 5), []),
        ((9.0, -1), ["early", "late", "low", "middle"]),
    ],
    ids=["the second", "between", "the last", "a more important one", "a less important one"],
)
def test_only_earlier_requests_of_no_lower_priority_are_passed_over(admitted, passed):
    ageing = Ageing()
    requests = [make("early", 0.0), make("middle", 2.0), make("low", 2.0, priority=-1), make("late", 3.0)]
    for request in requests:
        ageing.add(request)
    ageing.admitted(make("admitted", *admitted), now=10.0)
    assert sorted(r.request_id for r in requests if r.passed_over_s == 10.0) == passed
    assert sorted(ageing.aged(5.0, now=15.0)) == passed
    assert ageing.num_aged == len(passed)


def test_requests_of_equal_arrival_are_ordered_by_queueing():
    ageing = Ageing()
    first, last = make("first", 0.0, number=0), make("last", 0.0, number=2)
    ageing.add(first)
    ageing.add(last)
    ageing.admitted(make("admitted", 0.0, number=1), now=1.0)
    assert (first.passed_over_s, last.passed_over_s) == (1.0, None)


def test_the_time_starts_when_a_request_is_first_passed_over():
    ageing = Ageing()
    ageing.add(make("patient", 0.0))
    ageing.admitted(make("a", 1.0), now=10.0)
    ageing.admitted(make("b", 2.0), now=14.0)
    assert not ageing.aged(5.0, now=14.9)
    assert list(ageing.aged(5.0, now=15.0)) == ["patient"]


def test_a_request_that_left_the_queue_does_not_age():
    ageing = Ageing()
    request = make("gone", 0.0)
    ageing.add(request)
    ageing.admitted(make("a", 1.0), now=10.0)
    ageing.remove(request)
    assert not ageing.aged(5.0, now=100.0)
    assert ageing.num_aged == 0


def test_a_retraction_does_not_reset_the_waiting_time():
    ageing = Ageing()
    waits, aged = make("waits", 0.0), make("aged", 0.0)
    ageing.add(aged)
    ageing.admitted(make("a", 1.0), now=10.0)
    ageing.add(waits)
    ageing.admitted(make("b", 1.0), now=14.0)
    assert list(ageing.aged(5.0, now=16.0)) == ["aged"]
    for request in (waits, aged):
        ageing.remove(request)
        ageing.add(request)
    assert list(ageing.aged(5.0, now=18.0)) == ["aged"]
    assert sorted(ageing.aged(5.0, now=19.0)) == ["aged", "waits"]
    assert ageing.num_aged == 2


def test_a_retracted_request_is_passed_over_according_to_its_arrival():
    ageing = Ageing()
    ageing.add(make("later", 5.0))
    back = make("back", 1.0)
    ageing.add(back)
    ageing.admitted(make("between", 3.0), now=10.0)
    assert list(ageing.aged(1.0, now=11.0)) == ["back"]
