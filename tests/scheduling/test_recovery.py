"""The state of requests and KV memory after a failure of the engine's bookkeeping."""

import pytest

from graftlm.contracts import PrefixKey
from graftlm.scheduling import RequestStatus
from graftlm.types import FinishReason


def fail_bookkeeping(rig):
    """Raise within the cache, like a faulty plugin."""
    assert rig.loop.pin(None, 1.0) == 0
    rig.take(rig.loop.take_updates())


@pytest.mark.parametrize("overlap", [False, True])
def test_after_a_failure_rows_are_free_and_waiting_requests_still_wait(make_rig, overlap):
    rig = make_rig(num_rows=1, overlap=overlap)
    running, waiting = rig.add("running", [1, 2, 3], priority=1), rig.add("waiting", [4, 5])
    rig.step()
    seen = []

    def make_cache():
        seen.append((running.row, rig.scheduler.num_running, rig.scheduler.num_in_flight, waiting.status))
        return rig.make_cache()

    rig.scheduler.recover("a bug", make_cache)
    rig.take(rig.scheduler.take_updates())
    assert seen == [(None, 0, 0, RequestStatus.WAITING)]
    assert (rig.finish("running").reason, rig.finish("running").error) == (FinishReason.ERROR, "a bug")
    assert (waiting.status, rig.scheduler.num_waiting) == (RequestStatus.WAITING, 1)


@pytest.mark.parametrize("overlap", [False, True])
def test_without_a_new_cache_the_memory_is_reported_empty(make_rig, overlap):
    rig = make_rig(num_pages=64, overlap=overlap)
    rig.add("first", [*range(20)])
    rig.run()
    rig.add("running", [*range(30)])
    rig.add("waiting", [7, 8])
    rig.step()
    rig.cache_fails = True
    fail_bookkeeping(rig)
    assert {rig.finish(name).reason for name in ("running", "waiting")} == {FinishReason.ERROR}
    stats = rig.loop.stats()
    assert (stats.total_pages, stats.free_pages) == (64, 64)
    assert (stats.evictable_pages, stats.locked_pages, stats.owned_pages) == (0, 0, 0)
    assert rig.loop.cache_snapshot()["nodes"] == []
    assert rig.loop.flush_cache() == 0
    assert rig.loop.pin(PrefixKey(rig.requests["first"].token_ids), 1.0) == 0
    rig.scheduler.kv.check()

    rig.add("refused", [1])
    rig.step()
    assert rig.finish("refused").reason is FinishReason.ERROR
    rig.cache_fails = False
    rig.add("again", [*range(20)])
    rig.run()
    rig.assert_right("again")
    assert rig.finish("again").reason is FinishReason.LENGTH


def test_waiting_requests_fail_only_at_a_second_failure_without_a_step_between(make_rig):
    rig = make_rig(num_rows=1)
    rig.add("waiting", [7, 8], max_new_tokens=2)
    fail_bookkeeping(rig)
    rig.step()
    rig.add("next", [9])
    fail_bookkeeping(rig)
    assert rig.scheduler.num_waiting == 1
    fail_bookkeeping(rig)
    assert [rig.finish(name).reason for name in ("waiting", "next")] == [FinishReason.ERROR] * 2
    assert not rig.scheduler.has_work
