"""Prompts advance up to the first picture whose features are missing; the tower gets a share of each step."""

import numpy as np
import pytest

from graftlm.media import MediaItem, RequestMedia
from graftlm.memory import FeaturePool
from graftlm.plan import MediaResult, StepResult
from graftlm.scheduling.media_feeding import MediaFeeding
from graftlm.scheduling.plan_builder import media_plan
from graftlm.scheduling.request import Request
from graftlm.types import SamplingParams

#: Pictures with 4 features each, at 2 to 5, 6 to 9 and 12 to 15 of a prompt of 18 tokens.
PLACES = [2, 3, 4, 5, 6, 7, 8, 9, 12, 13, 14, 15]
LENGTH = 18


def request(row=0, keys=(b"a", b"b", b"c"), *, whole_runs=False):
    items = [MediaItem(key, 4, {}) for key in keys]
    media = RequestMedia(items, np.array(PLACES), 7, whole_runs=whole_runs)
    prompt = np.arange(LENGTH, dtype=np.int32)
    made = Request(f"{row}", prompt, SamplingParams(), 4, frozenset(), 0, 0.0, media=media)  # type: ignore[arg-type]
    made.row = row
    return made


def ready(feeding, *keys, errors=None):
    result = MediaResult(keys, errors or {}, 0.0)
    work = feeding.take_work(has_running=False)
    feeding.commit(media_plan(0, work), StepResult(np.empty(0, np.int32), {}, None, (), 0.0, media=result))
    return result


def begun(feeding):
    work = feeding.take_work(has_running=True)
    return [] if work is None else [item.key for item in work.begin]


def test_a_chunk_ends_before_features_that_are_missing():
    feeding, it = MediaFeeding(FeaturePool(100)), request()
    assert feeding.reach(it, 0, LENGTH, LENGTH) == 2
    assert begun(feeding) == [b"a"]
    assert feeding.reach(it, 2, LENGTH, LENGTH) == 2
    ready(feeding, b"a")
    assert feeding.reach(it, 2, 4, LENGTH) == 4
    assert feeding.reach(it, 4, LENGTH, LENGTH) == 6
    assert begun(feeding) == [b"b"]
    ready(feeding, b"b")
    assert feeding.reach(it, 6, LENGTH, LENGTH) == 12
    ready(feeding, b"c")
    assert feeding.reach(it, 12, LENGTH, LENGTH) == LENGTH


def test_features_are_released_when_their_tokens_are_planned_or_the_row_is_left():
    feeding, it = MediaFeeding(FeaturePool(4)), request()
    feeding.reach(it, 0, LENGTH, LENGTH)
    ready(feeding, b"a")
    assert feeding.reach(it, 2, LENGTH, LENGTH) == 6  # the second picture needs room
    feeding.planned(it, 6)
    assert begun(feeding) == []
    assert feeding.reach(it, 6, LENGTH, LENGTH) == 6
    work = feeding.take_work(has_running=True)
    assert ([item.key for item in work.begin], work.drop) == ([b"b"], (b"a",))
    feeding.leave(0)
    ready(feeding, b"b")
    assert feeding.reach(request(1, (b"x", b"b", b"c")), 0, LENGTH, LENGTH) == 2
    assert feeding.take_work(has_running=True).drop == (b"b",)


def test_two_requests_share_the_features_of_a_picture():
    feeding = MediaFeeding(FeaturePool(100))
    first, second = request(0), request(1)
    feeding.reach(first, 0, LENGTH, LENGTH)
    feeding.reach(second, 0, LENGTH, LENGTH)
    assert begun(feeding) == [b"a"]
    ready(feeding, b"a")
    assert feeding.pool.num_computed == 1
    assert feeding.reach(second, 2, 5, LENGTH) == 5


@pytest.mark.parametrize(
    ("start", "end", "most", "expected"),
    [
        (0, 4, LENGTH, 2),  # the run from 2 to 10 does not fit the budget: it is left for the next step
        (2, 4, LENGTH, 10),  # a chunk that starts with the run contains all of it
        (4, 6, LENGTH, 10),  # also after a cached part of the run
        (2, 4, 8, 2),  # without memory for all of it, the request waits
        (10, 12, LENGTH, 12),
        (10, 14, LENGTH, 12),
        (2, 10, LENGTH, 10),
    ],
)
def test_runs_that_are_not_causal_are_computed_in_one_chunk(start, end, most, expected):
    feeding, it = MediaFeeding(FeaturePool(100)), request(whole_runs=True)
    for key in (b"a", b"b", b"c"):
        feeding.pool.acquire(key, 4)
        feeding.pool.set_ready([key])
    assert feeding.reach(it, start, end, most) == expected


def test_an_error_fails_the_requests_that_wait_for_the_picture():
    feeding = MediaFeeding(FeaturePool(100))
    first, other = request(0), request(1, (b"x", b"y", b"z"))
    feeding.reach(first, 0, LENGTH, LENGTH)
    feeding.reach(other, 0, LENGTH, LENGTH)
    result = ready(feeding, b"x", errors={b"a": "broken"})
    assert feeding.failed(result, [first, other]) == [(first, "broken")]
    assert not feeding.pool.holds(b"a")


def test_the_tower_gets_half_of_a_step_beside_running_requests():
    feeding = MediaFeeding(FeaturePool(100))
    feeding.reach(request(), 0, LENGTH, LENGTH)
    assert feeding.take_work(has_running=True).max_s == 0.001  # before the first measurement
    plan = media_plan(0, feeding.take_work(has_running=False))
    decode = type(plan)(
        **{name: getattr(plan, name) for name in plan.__struct_fields__}
        | {"input_ids": np.zeros(1, np.int64), "num_decodes": 1, "query_lens": np.ones(1, np.int32)}
    )
    for tower_s in (0.0, 0.03, 0.01):  # its own time does not count
        media = MediaResult((), {}, tower_s)
        feeding.commit(decode, StepResult(np.zeros(1, np.int32), {}, None, (), 0.04 + tower_s, media=media))
    assert feeding.take_work(has_running=True).max_s == pytest.approx(0.02)
    assert feeding.take_work(has_running=False).max_s == 0.25


def test_dropped_steps_forget_all_features():
    feeding = MediaFeeding(FeaturePool(100))
    feeding.reach(request(), 0, LENGTH, LENGTH)
    begun(feeding)
    feeding.clear()
    assert feeding.take_work(has_running=False).drop == (b"a",)
    assert feeding.take_work(has_running=False) is None
    assert not feeding.has_pending
