"""The scheduler, its memory and its loop, on a device whose tokens show any mix-up of pages."""

import itertools

import numpy as np
import pytest

from graftlm.errors import NeverFitsError, QueueFullError
from graftlm.scheduling import RequestStatus
from graftlm.types import FinishReason, SamplingParams
from graftlm_scheduling.fcfs import FirstComeFirstServed

SHAPES = list(itertools.product([1, 4, 16], [7, 64], [False, True], [True, False]))


def prompts(seed, num, shared=40, longest=90):
    """Return prompts; every second one starts with a common prefix."""
    rng = np.random.default_rng(seed)
    common = rng.integers(0, 50, shared).tolist()
    return [(common if i % 2 else []) + rng.integers(0, 50, int(rng.integers(1, longest))).tolist() for i in range(num)]


@pytest.mark.parametrize(("page_size", "prefill_tokens", "overlap", "reuse"), SHAPES)
def test_every_request_gets_the_same_tokens_as_alone(make_rig, page_size, prefill_tokens, overlap, reuse):
    rig = make_rig(
        num_pages=2048 // page_size, page_size=page_size, prefill_tokens=prefill_tokens, overlap=overlap, reuse=reuse
    )
    for i, prompt in enumerate(prompts(seed=page_size, num=20)):
        rig.add(f"r{i}", prompt, max_new_tokens=1 + i % 9, stop=(i % 50,))
        rig.step()
    rig.run()
    for request_id in rig.requests:
        rig.assert_right(request_id)
    assert rig.scheduler.num_running == rig.scheduler.num_waiting == 0


@pytest.mark.parametrize(("page_size", "prefill_tokens", "overlap", "reuse"), SHAPES)
def test_retracted_requests_continue_where_they_were(make_rig, page_size, prefill_tokens, overlap, reuse):
    rig = make_rig(
        num_pages=160 // page_size, page_size=page_size, prefill_tokens=prefill_tokens, overlap=overlap, reuse=reuse
    )
    for i, prompt in enumerate(prompts(seed=1, num=12, shared=8, longest=30)):
        rig.add(f"r{i}", prompt, max_new_tokens=60)
    rig.run()
    assert rig.scheduler.counters.retractions > 0
    for request_id in rig.requests:
        rig.assert_right(request_id)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_step_that_retracts_for_lack_of_pages_admits_no_request(make_rig, overlap):
    rig = make_rig(num_pages=80, overlap=overlap)
    for i in range(8):
        rig.add(f"r{i}", [i, i + 1, i + 2], max_new_tokens=60)
    num_retracting = 0
    while rig.scheduler.has_work:
        before = rig.scheduler.counters.retractions
        held = {name for name, request in rig.requests.items() if request.row is not None}
        rig.step()
        if rig.scheduler.counters.retractions > before:
            num_retracting += 1
            assert {name for name, request in rig.requests.items() if request.row is not None} <= held
    assert num_retracting > 0
    for name in rig.requests:
        rig.assert_right(name)


def test_a_shared_prompt_is_computed_once_even_within_one_step(make_rig):
    rig = make_rig(num_pages=4096, num_rows=16, prefill_tokens=10_000)
    shared = list(range(40)) * 5
    for i in range(16):
        rig.add(f"r{i}", [*shared, i, i + 1])
    rig.step()
    assert rig.plans[0].num_tokens == 200 + 16 * 2
    rig.run()
    assert [rig.requests[f"r{i}"].cached_tokens for i in range(16)] == [0] + [200] * 15
    for request_id in rig.requests:
        rig.assert_right(request_id)


def test_requests_that_start_together_do_not_compute_the_same_chunks(make_rig):
    rig = make_rig(num_pages=4096, prefill_tokens=50)
    shared = list(range(50)) * 6
    for i in range(4):
        rig.add(f"r{i}", [*shared, i])
    rig.run()
    prefilled = sum(plan.num_prefill_tokens for plan in rig.plans)
    assert prefilled <= 300 + 4
    for request_id in rig.requests:
        rig.assert_right(request_id)


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_the_second_time_every_full_page_except_the_last_token_is_cached(make_rig, page_size):
    rig = make_rig(num_pages=512, page_size=page_size)
    lengths = [1, 2, 15, 16, 17, 32, 33, 60]
    for round_ in range(2):
        for n in lengths:
            rig.add(f"{round_}-{n}", list(range(n)))
        rig.run()
    for n in lengths:
        assert rig.requests[f"1-{n}"].cached_tokens == (n - 1) // page_size * page_size
        assert rig.tokens[f"1-{n}"] == rig.tokens[f"0-{n}"]


def test_namespaces_share_no_prefix(make_rig):
    rig = make_rig()
    for namespace in ("a", "b"):
        rig.add(namespace, range(30), namespace=namespace)
        rig.run()
    assert rig.requests["b"].cached_tokens == 0


def test_decode_continues_while_a_long_prompt_is_prefilled_in_chunks(make_rig):
    rig = make_rig(num_pages=1024, prefill_tokens=16)
    rig.add("short", [1, 2, 3], max_new_tokens=30)
    rig.step()
    rig.add("long", [i % 50 for i in range(200)])
    before = len(rig.plans)
    for _ in range(10):
        rig.step()
    for plan in rig.plans[before:]:
        assert plan.num_decodes >= 1
        assert plan.num_prefill_tokens <= 16
    rig.run()
    rig.assert_right("short")
    rig.assert_right("long")


def test_higher_priority_is_admitted_first_and_retracted_last(make_rig):
    rig = make_rig(num_rows=1)
    rig.add("low", [1], priority=0)
    rig.add("high", [2], priority=5)
    rig.step()
    assert rig.requests["high"].status is RequestStatus.RUNNING
    assert rig.requests["low"].status is RequestStatus.WAITING
    rig.run()

    rig = make_rig(num_pages=64, num_rows=4)
    for i in range(4):
        rig.add(f"p{i}", [i], max_new_tokens=40, priority=i)
    rig.run()
    assert rig.requests["p3"].num_retractions == 0
    assert rig.requests["p0"].num_retractions > 0
    for request_id in rig.requests:
        rig.assert_right(request_id)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("num_steps", range(6))
def test_an_abort_at_any_step_frees_the_pages_and_affects_no_other_request(make_rig, overlap, num_steps):
    rig = make_rig(num_pages=256, prefill_tokens=8, overlap=overlap)
    rig.add("victim", range(20), max_new_tokens=10)
    rig.add("other", [*range(20), 3], max_new_tokens=10)
    for _ in range(num_steps):
        rig.step()
    rig.loop.abort("victim", "the client left")
    assert rig.requests["victim"].status is RequestStatus.FINISHED
    rig.run()
    assert rig.finish("victim").reason is FinishReason.ABORT
    assert rig.finish("victim").error == "the client left"
    rig.assert_right("victim")
    rig.assert_right("other")
    usage = rig.scheduler.kv.usage
    assert usage.owned == usage.locked == 0


def test_an_abort_of_an_unknown_request_does_nothing(make_rig):
    rig = make_rig()
    rig.loop.abort("nobody", "")
    assert not rig.scheduler.has_work


@pytest.mark.parametrize("overlap", [False, True])
def test_a_waiting_or_running_request_ends_at_its_timeout(make_rig, overlap):
    rig = make_rig(num_rows=1, overlap=overlap)
    rig.add("running", range(5), max_new_tokens=200, timeout_s=0.02)
    rig.add("waiting", range(9), max_new_tokens=5, timeout_s=0.01)
    rig.add("patient", [4, 4], max_new_tokens=5, timeout_s=100)
    rig.run()
    for request_id in ("running", "waiting"):
        assert rig.finish(request_id).reason is FinishReason.ABORT
        assert "timed out" in rig.finish(request_id).error
        rig.assert_right(request_id)
    rig.assert_right("patient")


def test_a_request_that_can_never_fit_is_refused_with_both_sizes(make_rig):
    rig = make_rig(num_pages=10, page_size=4)
    with pytest.raises(
        NeverFitsError, match="36 prompt tokens and up to 5 more need 11 KV pages, but the engine has only 10"
    ):
        rig.add("big", range(36), max_new_tokens=5)
    rig.add("fits", range(36), max_new_tokens=4)
    rig.run()
    rig.assert_right("fits")


def test_a_full_queue_refuses_requests(make_rig):
    rig = make_rig(max_queued=2)
    rig.add("a", [1])
    rig.add("b", [2])
    with pytest.raises(QueueFullError, match="max_queued_requests"):
        rig.add("c", [3])
    rig.run()


@pytest.mark.parametrize("overlap", [False, True])
def test_bad_logits_fail_only_that_request(make_rig, overlap):
    rig = make_rig(overlap=overlap)
    rig.device.fail_rows = {3: 1}
    for i in range(3):
        rig.add(f"r{i}", [i, 7], max_new_tokens=8)
    rig.run()
    reasons = [rig.finish(f"r{i}").reason for i in range(3)]
    assert reasons == [FinishReason.LENGTH, FinishReason.ERROR, FinishReason.LENGTH]
    assert rig.finish("r1").error == "logits are not finite"
    for request_id in rig.requests:
        rig.assert_right(request_id)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("pooled", [False, True])
def test_tokens_computed_by_a_request_with_bad_logits_are_not_reused(make_rig, overlap, pooled):
    rig = make_rig(overlap=overlap)
    prompt = list(range(20))
    if pooled:
        rig.device.fail_pools = {0}
        rig.add_embedding("bad", prompt, "last")
    else:
        rig.device.fail_rows = {0: 0}
        rig.add("bad", prompt)
    rig.run()
    assert rig.finish("bad").reason is FinishReason.ERROR
    for name, num_cached in (("next", 0), ("last", 19)):
        rig.add(name, prompt)
        rig.run()
        assert rig.requests[name].cached_tokens == num_cached
        rig.assert_right(name)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("bad_step", [0, 1, 3])
def test_a_step_that_raises_fails_only_its_requests(make_rig, overlap, bad_step):
    rig = make_rig(num_pages=512, num_rows=3, prefill_tokens=16, overlap=overlap)
    rig.device.fail_steps = {bad_step}
    for i in range(8):
        rig.add(f"r{i}", [*range(20), i], max_new_tokens=5)
    rig.run()
    failed = {r for r in rig.requests if rig.finish(r).reason is FinishReason.ERROR}
    assert 1 <= len(failed) <= 3
    for request_id in rig.requests:
        rig.assert_right(request_id)
    for request_id in failed:
        assert rig.finish(request_id).error == "RuntimeError: the device is out of memory"


@pytest.mark.parametrize("overlap", [False, True])
def test_prompt_logprobs_cover_every_position_once_for_any_chunks(make_rig, overlap):
    params = SamplingParams(prompt_logprobs=0)
    rig = make_rig(num_pages=128, prefill_tokens=7, num_rows=4, overlap=overlap)
    rig.add("warm", range(30))
    rig.run()
    for i in range(4):
        rig.add(f"r{i}", range(30), max_new_tokens=60, params=params)
    rig.run()
    assert rig.scheduler.counters.retractions > 0
    for i in range(4):
        reported = [entry.token_id for update in rig.updates[f"r{i}"] for entry in update.prompt_logprobs]
        assert reported == list(range(1, 30))
        rig.assert_right(f"r{i}")


def positions_read(rig):
    """Return the prompt positions whose logits the rig's steps computed, in order."""
    return [
        int(position)
        for plan in rig.plans
        for span in plan.prompt_spans
        for position in plan.positions[span.start : span.start + len(span.targets)]
    ]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("chunk", [7, 64])
@pytest.mark.parametrize("start", [0, 1, 2, 17, 33, 49, 50, 1000])
def test_prompt_logprobs_with_a_start_compute_no_earlier_position(make_rig, start, chunk, page_size, overlap):
    rig = make_rig(num_pages=256 // page_size, page_size=page_size, prefill_tokens=chunk, overlap=overlap)
    rig.add("warm", range(50))
    rig.run()
    rig.add("r", range(50), params=SamplingParams(prompt_logprobs=0, prompt_logprobs_start=start))
    rig.run()
    reported = [entry.token_id for update in rig.updates["r"] for entry in update.prompt_logprobs]
    assert reported == list(range(max(start, 1), 50))
    assert positions_read(rig) == [token - 1 for token in reported]
    may_reuse = min(max(start - 1, 0), 49)
    assert rig.requests["r"].cached_tokens == may_reuse // page_size * page_size
    rig.assert_right("r")


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("page_size", [1, 4])
def test_prompt_logprobs_with_a_start_are_reported_once_after_retractions(make_rig, page_size, overlap):
    params = SamplingParams(prompt_logprobs=0, prompt_logprobs_start=20)
    rig = make_rig(num_pages=128 // page_size, page_size=page_size, prefill_tokens=7, num_rows=4, overlap=overlap)
    for i in range(4):
        rig.add(f"r{i}", range(30), max_new_tokens=60, params=params)
    rig.run()
    assert rig.scheduler.counters.retractions > 0
    for i in range(4):
        reported = [entry.token_id for update in rig.updates[f"r{i}"] for entry in update.prompt_logprobs]
        assert reported == list(range(20, 30))
        rig.assert_right(f"r{i}")


def test_requests_for_the_logprobs_of_a_shared_prompt_compute_its_start_once(make_rig):
    rig = make_rig(page_size=4, prefill_tokens=128)
    params = SamplingParams(prompt_logprobs=0, prompt_logprobs_start=50)
    for i in range(8):
        rig.add(f"r{i}", [*range(50), i, i], max_new_tokens=1, params=params)
    rig.run()
    (plan,) = rig.plans
    assert plan.query_lens.tolist() == [52] + 7 * [52 - 48]
    assert [len(span.targets) for span in plan.prompt_spans] == 8 * [2]


class WatchedPolicy(FirstComeFirstServed):
    """Counts the calls of `order`."""

    num_orders = 0

    def order(self, waiting, now):
        self.num_orders += 1
        return super().order(waiting, now)


@pytest.mark.parametrize("lacks", [{"num_rows": 2}, {"num_pages": 44}], ids=["rows", "pages"])
def test_the_queue_is_ordered_only_if_a_request_could_be_admitted(make_rig, lacks):
    policy = WatchedPolicy()
    rig = make_rig(policy=policy, **lacks)
    for i in range(2):
        rig.add(f"runs{i}", [i] * 10, max_new_tokens=30)
        rig.step()
    for i in range(5):
        rig.add(f"waits{i}", [i, 49], max_new_tokens=3)
    for _ in range(10):
        rig.step()
    assert policy.num_orders == 0
    rig.run()
    assert policy.num_orders > 0
    for request_id in rig.requests:
        rig.assert_right(request_id)


class ForgetfulPolicy:
    max_wait_s = None
    preemption = None

    def order(self, waiting, now):
        return waiting[1:]


class TuplePolicy:
    max_wait_s = "soon"
    preemption = None

    def order(self, waiting, now):
        return tuple(waiting)


class RaisingPolicy:
    max_wait_s = None
    preemption = None

    def order(self, waiting, now):
        raise KeyError("no such thing")


@pytest.mark.parametrize("policy", [ForgetfulPolicy(), RaisingPolicy(), TuplePolicy()])
def test_a_faulty_policy_loses_its_order_but_no_request(make_rig, policy):
    rig = make_rig(policy=policy)
    for i in range(5):
        rig.add(f"r{i}", [i])
    rig.run()
    for request_id in rig.requests:
        rig.assert_right(request_id)


@pytest.mark.parametrize("method", ["match", "insert", "lock", "unlock", "evict"])
@pytest.mark.parametrize("overlap", [False, True])
def test_a_cache_that_raises_fails_running_requests_and_the_engine_continues(make_rig, method, overlap):
    rig = make_rig(num_pages=64, num_rows=3, overlap=overlap)
    cache = rig.scheduler.kv.cache
    working = getattr(cache, method)
    calls = itertools.count()

    def broken(*args, **kwargs):
        if next(calls) >= 3:
            raise ZeroDivisionError("a bug of the plugin")
        return working(*args, **kwargs)

    setattr(cache, method, broken)
    for i in range(10):
        rig.add(f"r{i}", [*range(15), i], max_new_tokens=12)
    rig.run()
    reasons = [rig.finish(r).reason for r in rig.requests]
    assert FinishReason.ERROR in reasons
    assert reasons.count(FinishReason.LENGTH) >= 5
    for request_id in rig.requests:
        rig.assert_right(request_id)


def test_a_request_passed_over_for_too_long_is_admitted_first(make_rig):
    rig = make_rig(num_rows=1)
    rig.add("warm", [1, 1, 1, 1], max_new_tokens=1)
    rig.run()
    rig.add("old", [9, 9, 9, 9], max_new_tokens=1)
    order = []
    limit_s = rig.policy.max_wait_s
    for i in range(200):
        rig.add(f"new{i}", [1, 1, 1, 1, i % 50], max_new_tokens=1)
        rig.step()
        rig.now += limit_s / 100
        order += [r for r in rig.requests if rig.updates[r] and r not in order]
        if "old" in order:
            break
    assert order.index("old") > 50
    assert rig.requests["old"].finished_s < 1.1 * limit_s
    assert rig.scheduler.counters.aged_requests == 1


@pytest.mark.parametrize("overlap", [False, True])
def test_a_permanent_failure_ends_every_request(make_rig, overlap):
    rig = make_rig(overlap=overlap)
    for i in range(4):
        rig.add(f"r{i}", [i, 3], priority=i)
    rig.step()
    late = rig.add("late", [9])
    rig.add("later", [9])
    late.priority = "high"  # the priority is not checked here, and ordering the queue raises at each plan
    rig.run(max_steps=20)
    assert rig.finish("late").reason is FinishReason.ERROR
    assert not rig.scheduler.has_work


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(("mix_chunks", "num_pages"), [(True, 256), (False, 256), (False, 24)])
def test_chunks_and_decodes_share_a_step_only_if_mix_chunks_is_on(make_rig, mix_chunks, num_pages, overlap):
    rig = make_rig(num_pages=num_pages, page_size=4, prefill_tokens=16, overlap=overlap, mix_chunks=mix_chunks)
    for i, prompt in enumerate(prompts(seed=3, num=8, longest=30)):
        rig.add(f"r{i}", prompt, max_new_tokens=6)
        rig.step()
    rig.run()
    for request_id in rig.requests:
        rig.assert_right(request_id)
    mixed = [plan for plan in rig.plans if len(plan.device_idx) and plan.num_tokens > len(plan.device_idx)]
    assert bool(mixed) == mix_chunks


@pytest.mark.parametrize("overlap", [False, True])
def test_bad_logits_fail_only_their_request_even_after_a_retraction(make_rig, overlap):
    """In a run with retractions, every step reports bad logits once for each of its rows."""
    prompts = {f"r{i}": list(range(10 * i, 10 * i + 8)) for i in range(3)}
    retracted = 0
    for step_id in range(40):
        for row in range(3):
            rig = make_rig(num_pages=48, num_rows=3, overlap=overlap)
            rig.device.fail_rows = {step_id: row}
            for request_id, prompt in prompts.items():
                rig.add(request_id, prompt, max_new_tokens=20)
            rig.run()
            errors = [rig.finish(r).error for r in prompts if rig.finish(r).error is not None]
            assert errors in ([], ["logits are not finite"])
            for request_id in prompts:
                rig.assert_right(request_id)
            retracted += rig.scheduler.counters.retractions
    assert retracted > 0
