"""Steps that verify drafts: the output is that of plain decoding, and no page is lost, whatever is drafted."""

import itertools

import numpy as np
import pytest

from graftlm.contracts import Draft, Drafter
from graftlm.memory import WindowSpan
from graftlm.speculation import Speculator
from graftlm.testing.drafter import SCRIPTS, AllDrafts, ScriptedDrafter
from graftlm.testing.fake_device import expected_output, expected_token
from graftlm.types import FinishReason, SamplingParams

VOCAB = 50


def oracle(request, num_tokens):
    return expected_output(request.token_ids.tolist(), num_tokens, VOCAB)


def scripted(*scripts, seed=0, max_drafts=8):
    drafter = ScriptedDrafter(oracle, scripts, VOCAB, seed)
    return drafter, Speculator({"scripted": drafter}, max_drafts, VOCAB, AllDrafts(max_drafts))


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_output_is_that_of_plain_decoding_whatever_is_drafted(make_rig, script, overlap, page_size):
    drafter, speculator = scripted(script)
    rig = make_rig(overlap=overlap, page_size=page_size, speculator=speculator)
    for i in range(12):
        rig.add(f"r{i}", range(i, 2 * i + 3), max_new_tokens=1 + 7 * i % 40, stop=(i,) if i % 3 else ())
    rig.run()
    for i in range(12):
        rig.assert_right(f"r{i}")
    assert drafter.num_calls
    counts = speculator.counts["scripted"]
    if script in ("right", "too_long"):
        assert counts.accepted == counts.drafted > 100
    if script == "wrong":
        assert counts.accepted == 0 < counts.drafted
    if script in ("none", "raises", "not_drafts", "outside", "too_few"):
        assert counts.drafted == 0


def test_drafts_that_are_right_save_steps(make_rig):
    _, speculator = scripted("too_long", max_drafts=7)
    rig = make_rig(speculator=speculator)
    rig.add("a", [1, 2, 3], max_new_tokens=33)
    rig.run()
    rig.assert_right("a")
    assert rig.scheduler.counters.steps == 1 + 4  # the prompt, then 8 tokens a step
    assert [len(update.token_ids) for update in rig.updates["a"]] == [1, 8, 8, 8, 8]
    assert rig.updates["a"][-1].usage.drafted_tokens == rig.updates["a"][-1].usage.accepted_draft_tokens == 28


@pytest.mark.parametrize("max_new_tokens", range(1, 12))
def test_no_token_is_sampled_past_the_limit(make_rig, max_new_tokens):
    _, speculator = scripted("too_long", max_drafts=5)
    rig = make_rig(speculator=speculator, num_pages=3 + max_new_tokens)
    rig.add("a", [1, 2, 3], max_new_tokens=max_new_tokens)
    rig.run()
    rig.assert_right("a")


def test_a_draft_ends_before_a_stop_token(make_rig):
    _, speculator = scripted("too_long")
    rig = make_rig(speculator=speculator)
    expected = expected_output([1, 2, 3], 10, VOCAB)
    stop = next(token for i, token in enumerate(expected) if i > 3 and token not in expected[:i])
    rig.add("a", [1, 2, 3], max_new_tokens=40, stop=(stop,))
    rig.run()
    rig.assert_right("a")
    assert rig.finish("a").reason is FinishReason.STOP
    verified = [plan.input_ids for plan in rig.plans if plan.num_drafts is not None]
    assert verified
    assert not any(stop in ids for ids in verified)


class StopsAfter:
    """A stop watch whose stop string is complete after some tokens."""

    def __init__(self, num_tokens):
        self.num_missing = num_tokens

    def push(self, token_ids):
        self.num_missing -= len(token_ids)

    @property
    def matched(self):
        return "stop" if self.num_missing <= 0 else None


@pytest.mark.parametrize("script", ["too_long", "wrong"])
@pytest.mark.parametrize("num_tokens", range(1, 13))
def test_accepted_drafts_after_a_stop_string_are_not_counted(make_rig, script, num_tokens):
    _, speculator = scripted(script, max_drafts=4)
    rig = make_rig(speculator=speculator)
    rig.add("a", [1, 2, 3], max_new_tokens=40, stop_watch=StopsAfter(num_tokens))
    rig.run()
    assert rig.tokens["a"] == expected_output([1, 2, 3], num_tokens, VOCAB)
    # The first token, and the one after each draft of 4 tokens, is no draft.
    num_drafts = 0 if script == "wrong" else num_tokens - 1 - (num_tokens - 1) // 5
    assert rig.updates["a"][-1].usage.accepted_draft_tokens == num_drafts
    assert speculator.counts["scripted"].accepted == num_drafts


def test_drafts_are_dropped_where_pages_are_short(make_rig):
    _, speculator = scripted("too_long", max_drafts=8)
    rig = make_rig(speculator=speculator, num_pages=40, page_size=1)
    for i in range(6):
        rig.add(f"r{i}", [i, i + 1, i + 2], max_new_tokens=30)
    rig.run()
    for i in range(6):
        rig.assert_right(f"r{i}")
    assert rig.scheduler.counters.retractions > 0


def test_cached_pages_make_room_for_drafts(make_rig):
    _, speculator = scripted("too_long", max_drafts=7)
    rig = make_rig(speculator=speculator, num_pages=50, page_size=1)
    for i in range(6):
        rig.add(f"r{i}", [40 + i, 1, 2], max_new_tokens=22)
        rig.run()
    assert rig.scheduler.kv.pool.num_free < 7
    before = rig.scheduler.counters.steps
    rig.add("a", [1, 2, 3], max_new_tokens=33)
    rig.run()
    rig.assert_right("a")
    assert rig.scheduler.counters.steps - before == 1 + 4  # the prompt, then 8 tokens a step


def test_a_drafter_of_stop_tokens_does_not_end_overlap(make_rig):
    class Stops(Drafter):
        def propose(self, requests):
            return [Draft(np.full(4, 49, dtype=np.int32), 0.9) for _ in requests]

    rig = make_rig(speculator=Speculator({"stops": Stops()}, 8, VOCAB, AllDrafts(8)), overlap=True)
    rig.add("a", [1, 2, 3], max_new_tokens=40, stop=(49,))
    waits = []
    while rig.scheduler.has_work:
        rig.step()
        waits.append(rig.scheduler.must_commit_first())
    assert not any(waits)


def test_drafts_wait_for_steps_without_prefill(make_rig):
    _, speculator = scripted("too_long")
    rig = make_rig(speculator=speculator, prefill_tokens=4)
    rig.add("a", [1], max_new_tokens=30)
    rig.add("b", range(40), max_new_tokens=3)
    rig.run()
    rig.assert_right("a")
    rig.assert_right("b")
    assert any(plan.num_drafts is not None for plan in rig.plans)
    assert all(plan.num_prefill_tokens == 0 for plan in rig.plans if plan.num_drafts is not None)


@pytest.mark.parametrize("overlap", [False, True])
def test_window_pages_stay_right_when_drafts_are_rejected(make_rig, overlap):
    _, speculator = scripted("right", "wrong", "partly", "random", seed=3)
    span = WindowSpan(window_tokens=5, page_size=2)
    rig = make_rig(overlap=overlap, page_size=2, window=span, num_window_pages=60, num_pages=100, speculator=speculator)
    for i in range(8):
        rig.add(f"r{i}", range(i, i + 9), max_new_tokens=30)
    rig.run()
    for i in range(8):
        rig.assert_right(f"r{i}")
    assert speculator.counts["scripted"].accepted > 20


def test_a_request_may_decline_speculation(make_rig):
    _, speculator = scripted("too_long")
    rig = make_rig(speculator=speculator)
    rig.add("a", [1, 2], max_new_tokens=20, params=SamplingParams(speculation=False))
    rig.run()
    rig.assert_right("a")
    assert speculator.counts["scripted"].drafted == 0


def test_an_abort_while_drafts_are_verified_frees_the_pages(make_rig):
    _, speculator = scripted("too_long")
    for num_steps in range(1, 9):
        rig = make_rig(speculator=speculator, overlap=True)
        rig.add("a", [1, 2, 3], max_new_tokens=60)
        rig.add("b", [4, 5], max_new_tokens=60)
        for _ in range(num_steps):
            rig.step()
        rig.loop.abort("a", "changed my mind")
        rig.run()
        rig.assert_right("a")
        rig.assert_right("b")
        assert rig.scheduler.kv.usage.owned == 0


@pytest.mark.parametrize("overlap", [False, True])
def test_a_failed_row_keeps_the_tokens_before_it(make_rig, overlap):
    for bad in range(9):
        _, speculator = scripted("too_long")
        rig = make_rig(speculator=speculator, overlap=overlap)
        rig.add("a", [1, 2, 3], max_new_tokens=60)
        rig.device.fail_rows = {2: bad}
        rig.run()
        rig.assert_right("a")
        assert rig.finish("a").error == "logits are not finite"
        assert len(rig.tokens["a"]) == 1 + 9 + bad


def test_a_sample_after_a_rejected_draft_may_fail_without_effect(make_rig):
    _, speculator = scripted("wrong")
    rig = make_rig(speculator=speculator)
    rig.add("a", [1, 2, 3], max_new_tokens=20)
    rig.device.fail_rows = {2: 1}
    rig.run()
    rig.assert_right("a")
    assert rig.finish("a").reason is FinishReason.LENGTH


def test_a_drafter_that_fails_for_one_request_serves_the_others(make_rig, caplog):
    class FailsForOne(Drafter):
        def propose(self, requests):
            if any(request.token_ids[0] == 7 for request in requests):
                raise KeyError("seven")
            return [Draft(np.array(oracle(request, request.limit), dtype=np.int32), 1.0) for request in requests]

    speculator = Speculator({"fails": FailsForOne()}, 4, VOCAB, AllDrafts(4))
    rig = make_rig(speculator=speculator)
    for first in (6, 7, 8):
        rig.add(f"r{first}", [first], max_new_tokens=20)
    rig.run()
    usages = {name: updates[-1].usage for name, updates in rig.updates.items()}
    assert [usages[f"r{first}"].drafted_tokens > 0 for first in (6, 7, 8)] == [True, False, True]
    assert sum("drafter 'fails' failed" in record.message for record in caplog.records) == 1
    for first in (6, 7, 8):
        rig.assert_right(f"r{first}")


def test_drafters_get_read_only_views_of_the_tokens(make_rig):
    class Writes(Drafter):
        num_refused = 0

        def propose(self, requests):
            for request in requests:
                assert request.token_ids.base is not None
                with pytest.raises(ValueError, match="read-only"):
                    request.token_ids[-1] = 0
                self.num_refused += 1
            return [None] * len(requests)

    drafter = Writes()
    rig = make_rig(speculator=Speculator({"writes": drafter}, 4, VOCAB, AllDrafts(4)))
    rig.add("a", [1, 2, 3], max_new_tokens=9)
    rig.run()
    rig.assert_right("a")
    assert drafter.num_refused > 5


def test_rows_are_closed_when_their_requests_leave(make_rig):
    drafter, speculator = scripted("right")
    rig = make_rig(speculator=speculator)
    rig.add("a", [1, 2], max_new_tokens=9)
    rig.run()
    assert drafter.closed == [0]


@pytest.mark.parametrize("overlap", [False, True])
def test_a_failed_step_with_drafts_fails_its_requests_only(make_rig, overlap):
    _, speculator = scripted("right")
    rig = make_rig(speculator=speculator, overlap=overlap)
    rig.device.fail_steps = {3}
    rig.add("a", [1, 2, 3], max_new_tokens=60)
    rig.run()
    rig.add("b", [1, 2, 3], max_new_tokens=60)
    rig.run()
    rig.assert_right("b")
    assert rig.finish("a").reason is FinishReason.ERROR


def test_the_first_tokens_digest_is_what_the_next_step_reads(make_rig):
    """Rejected drafts leave their keys and values behind; the tokens that follow overwrite them."""
    _, speculator = scripted("wrong", "random", "partly", seed=1)
    rig = make_rig(speculator=speculator)
    rig.add("a", [3], max_new_tokens=40)
    rig.run()
    tokens = [3, *rig.tokens["a"]]
    assert all(expected_token(tokens[:i], VOCAB) == tokens[i] for i in itertools.islice(range(1, 41), 40))
