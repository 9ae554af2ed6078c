"""Embeddings in the scheduler read every hidden state exactly once, also after retractions and failures."""

import itertools

import pytest

from graftlm.scheduling import RequestStatus
from graftlm.types import FinishReason, SamplingParams

LONG = [i * 7 % 50 for i in range(60)]
BOTH = pytest.mark.parametrize("pooling", ["mean", "last"])
OVERLAP = pytest.mark.parametrize("overlap", [False, True])


@pytest.mark.covering
@BOTH
@pytest.mark.parametrize(
    ("page_size", "prefill_tokens", "overlap", "reuse"),
    list(itertools.product([1, 4, 16], [1, 7, 64], [False, True], [True, False])),
)
def test_each_prompt_has_one_vector_for_any_chunks_pages_and_cached_prefixes(
    make_rig, pooling, page_size, prefill_tokens, overlap, reuse
):
    rig = make_rig(
        num_pages=2048 // page_size, page_size=page_size, prefill_tokens=prefill_tokens, overlap=overlap, reuse=reuse
    )
    for i, length in enumerate([1, 2, 16, 17, 60, 60]):
        rig.add_embedding(f"e{i}", LONG[:length], pooling)
        rig.add(f"g{i}", LONG[: length + i % 2], max_new_tokens=5)
        rig.step()
    rig.run()
    for request_id in rig.requests:
        rig.assert_right(request_id)
        assert rig.finish(request_id).error is None


@BOTH
@OVERLAP
def test_an_embedding_samples_nothing_and_ends_with_the_commit_of_its_last_chunk(make_rig, pooling, overlap):
    rig = make_rig(prefill_tokens=16, overlap=overlap)
    rig.add_embedding("e", LONG, pooling)
    rig.run()
    assert [plan.num_tokens for plan in rig.plans] == [16, 16, 16, 12]
    assert not any(len(plan.sample_idx) for plan in rig.plans)
    assert [span.is_last for plan in rig.plans for span in plan.pool_spans][-1]
    assert rig.finish("e").reason is FinishReason.STOP
    usage = rig.updates["e"][0].usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (60, 0)
    assert rig.scheduler.counters.generated_tokens == 0
    rig.assert_right("e")


@pytest.mark.parametrize(("pooling", "cached_tokens"), [("mean", 0), ("last", 59)])
def test_only_last_token_pooling_can_use_a_cached_prefix(make_rig, pooling, cached_tokens):
    rig = make_rig()
    rig.add("warm", LONG)
    rig.run()
    rig.add_embedding("e", LONG, pooling)
    rig.run()
    assert rig.requests["e"].cached_tokens == cached_tokens
    rig.assert_right("e")


@BOTH
def test_tokens_computed_for_an_embedding_are_cached_for_others(make_rig, pooling):
    rig = make_rig()
    rig.add_embedding("e", LONG, pooling)
    rig.run()
    rig.add("g", LONG)
    rig.run()
    assert rig.requests["g"].cached_tokens == 59
    rig.assert_right("g")


def test_an_embedding_may_fill_the_memory_to_the_last_page(make_rig):
    rig = make_rig(num_pages=60)
    rig.add_embedding("e", LONG, "mean")
    rig.run()
    rig.assert_right("e")
    assert rig.finish("e").reason is FinishReason.STOP


@BOTH
@OVERLAP
@pytest.mark.parametrize("num_steps", range(1, 9))
def test_a_retraction_at_any_step_loses_and_repeats_no_hidden_state(make_rig, pooling, overlap, num_steps):
    rig = make_rig(num_pages=128, prefill_tokens=10, overlap=overlap)
    rig.add_embedding("e", LONG, pooling)
    rig.add("g", [*LONG, 3])
    for _ in range(num_steps):
        rig.step()
    if rig.requests["e"].status is RequestStatus.RUNNING:
        rig.scheduler.retract_all()
    rig.run()
    for request_id in rig.requests:
        rig.assert_right(request_id)
        assert rig.finish(request_id).error is None


def test_an_embedding_retracted_for_lack_of_pages_continues(make_rig):
    rig = make_rig(num_pages=110, prefill_tokens=1)
    rig.add("g", [1, 2], max_new_tokens=70, priority=1)
    rig.step()
    rig.add_embedding("e", LONG, "mean")
    rig.run()
    assert rig.requests["e"].num_retractions > 0
    assert rig.finish("e").reason is FinishReason.STOP
    rig.assert_right("e")
    rig.assert_right("g")


@BOTH
@OVERLAP
@pytest.mark.parametrize("bad_step", range(1, 6))
def test_other_embeddings_continue_after_a_failed_step_without_repetition(make_rig, pooling, overlap, bad_step):
    rig = make_rig(prefill_tokens=10, overlap=overlap)
    rig.device.fail_steps = {bad_step}
    for i in range(3):
        rig.add_embedding(f"e{i}", [i, *LONG[:24]], pooling)
    rig.run()
    reasons = [rig.finish(request_id).reason for request_id in rig.requests]
    assert FinishReason.ERROR in reasons
    assert FinishReason.STOP in reasons
    for request_id in rig.requests:
        rig.assert_right(request_id)


@BOTH
@OVERLAP
def test_hidden_states_read_before_another_requests_failure_are_not_read_again(make_rig, pooling, overlap):
    rig = make_rig(num_rows=1, prefill_tokens=10, overlap=overlap)
    rig.add_embedding("e", LONG, pooling)
    rig.step()
    rig.step()
    rig.loop.settle()
    rig.loop.retract_all()
    rig.device.fail_steps = {rig.scheduler.counters.steps}
    rig.add("g", [1, 2, 3], priority=1)
    rig.run()
    assert rig.finish("g").reason is FinishReason.ERROR
    assert rig.finish("e").reason is FinishReason.STOP
    rig.assert_right("e")


@BOTH
@OVERLAP
def test_hidden_states_that_are_not_finite_fail_only_that_request(make_rig, pooling, overlap):
    rig = make_rig(overlap=overlap)
    rig.device.fail_pools = {1}
    rig.add("g", [*range(20)], max_new_tokens=8)
    rig.step()
    rig.add_embedding("bad", LONG, pooling)
    rig.step()
    rig.add_embedding("good", LONG, pooling)
    rig.run()
    assert rig.finish("bad").error == "hidden states are not finite"
    assert rig.finish("good").reason is FinishReason.STOP
    assert rig.finish("g").reason is FinishReason.LENGTH
    for request_id in rig.requests:
        rig.assert_right(request_id)


@BOTH
@OVERLAP
@pytest.mark.parametrize("num_steps", range(5))
def test_an_abort_at_any_step_returns_no_vector_and_frees_the_pages(make_rig, pooling, overlap, num_steps):
    rig = make_rig(prefill_tokens=8, overlap=overlap)
    rig.add_embedding("e", LONG, pooling)
    rig.add("g", [*LONG, 3])
    for _ in range(num_steps):
        rig.step()
    rig.loop.abort("e", "the client left")
    rig.run()
    assert rig.finish("e").reason is FinishReason.ABORT
    rig.assert_right("e")
    rig.assert_right("g")
    usage = rig.scheduler.kv.usage
    assert usage.owned == usage.locked == 0


def test_a_step_may_contain_logprobs_pooling_and_samples(make_rig):
    rig = make_rig(prefill_tokens=200)
    rig.add("g", [1, 2, 3], max_new_tokens=6)
    rig.step()
    rig.add_embedding("mean", LONG, "mean")
    rig.add("logprobs", range(30), params=SamplingParams(prompt_logprobs=0))
    rig.add_embedding("last", [9], "last")
    rig.step()
    plan = rig.plans[-1]
    assert (len(plan.pool_spans), len(plan.prompt_spans), len(plan.sample_idx)) == (2, 1, 2)
    rig.run()
    reported = [entry.token_id for update in rig.updates["logprobs"] for entry in update.prompt_logprobs]
    assert reported == list(range(1, 30))
    for request_id in rig.requests:
        rig.assert_right(request_id)
