"""Requests under a grammar wait for it, sample only allowed tokens, and do not affect other requests."""

import itertools
import sys
import threading
from concurrent.futures import Future

import numpy as np
import pytest

from graftlm.contracts import CompiledGrammar, Draft, Drafter, GrammarKind, GrammarMatcher, GrammarSpec
from graftlm.engine.engine_thread import EngineThread
from graftlm.errors import GrammarError, RequestFailedError
from graftlm.scheduling import RequestGrammar, RequestStatus
from graftlm.speculation import Speculator
from graftlm.step_loop import StepLoop
from graftlm.testing import FakeGrammarBackend
from graftlm.testing.drafter import AllDrafts
from graftlm.testing.fake_device import expected_output
from graftlm.types import FinishReason, SamplingParams

VOCAB = 50
END = 49
LETTERS = [chr(ord("A") + i) for i in range(END)]
BACKEND = FakeGrammarBackend([*LETTERS, ""], VOCAB, [END])
WORDS = "ABCDE FGHAB KLMAB ABCDEFG XYZ " * 6


def compiled(words=WORDS) -> Future:
    future = Future()
    future.set_result(BACKEND.compile(GrammarSpec(GrammarKind.EBNF, words)))
    return future


def grammar(words=WORDS, deadline_s=1000.0):
    return under(compiled(words), deadline_s)


def under(compiling, deadline_s=1000.0):
    return RequestGrammar(compiling, lambda: deadline_s, VOCAB, BACKEND.fill_bitmasks)


def right_tokens(request, words=WORDS):
    matcher = BACKEND.compile(GrammarSpec(GrammarKind.EBNF, words)).matcher()
    return expected_output(request.prompt_token_ids.tolist(), request.max_new_tokens, VOCAB, matcher)


def assert_right(rig, request_id, words=WORDS):
    """Assert that the request ended as expected, with the device's tokens among those that the grammar allows."""
    expected = right_tokens(rig.requests[request_id], words)
    assert rig.tokens[request_id] == expected
    ended = expected[-1] == END
    assert rig.finish(request_id).reason is (FinishReason.STOP if ended else FinishReason.LENGTH)
    assert rig.finish(request_id).matched_stop == (END if ended else None)


@pytest.mark.parametrize(
    ("page_size", "chunk", "overlap", "reuse"),
    list(itertools.product([1, 4], [7, 64], [False, True], [True, False])),
)
def test_requests_sample_allowed_tokens_and_others_are_not_affected(make_rig, page_size, chunk, overlap, reuse):
    rig = make_rig(num_pages=2048 // page_size, page_size=page_size, prefill_tokens=chunk, overlap=overlap, reuse=reuse)
    for i in range(16):
        under_grammar = {"grammar": grammar()} if i % 2 else {}
        rig.add(f"r{i}", [*range(20), i], max_new_tokens=5 + 3 * i, **under_grammar)
        rig.step()
    rig.run()
    for i in range(16):
        if i % 2:
            assert_right(rig, f"r{i}")
        else:
            rig.assert_right(f"r{i}")
    assert {rig.finish(f"r{i}").reason for i in range(1, 16, 2)} == {FinishReason.STOP, FinishReason.LENGTH}


@pytest.mark.parametrize("overlap", [False, True])
def test_matchers_continue_at_their_place_after_a_retraction(make_rig, overlap):
    rig = make_rig(num_pages=160, overlap=overlap)
    for i in range(10):
        rig.add(f"r{i}", range(i, i + 12), max_new_tokens=60, grammar=grammar("ABCDEFGH KLMNOPQ " * 25))
    rig.run()
    assert rig.scheduler.counters.retractions > 0
    for i in range(10):
        assert_right(rig, f"r{i}", "ABCDEFGH KLMNOPQ " * 25)
    assert rig.scheduler.kv.usage.owned == 0


def test_other_requests_continue_while_one_waits_for_its_grammar(make_rig):
    rig = make_rig(num_rows=2)
    future = Future()
    waiting = rig.add("waiting", range(5), grammar=under(future), priority=9)
    for i in range(4):
        rig.add(f"r{i}", [i])
    for _ in range(30):
        rig.step()
    for i in range(4):
        rig.assert_right(f"r{i}")
    assert waiting.status is RequestStatus.WAITING
    future.set_result(compiled().result())
    rig.run()
    assert_right(rig, "waiting")


@pytest.mark.parametrize("overlap", [False, True])
def test_completions_share_a_compilation_but_not_a_matcher(make_rig, overlap):
    rig = make_rig(overlap=overlap)
    shared = compiled()
    for i in range(6):
        rig.add(f"r{i}", [i], max_new_tokens=40, grammar=under(shared))
    rig.run()
    for i in range(6):
        assert_right(rig, f"r{i}")


def test_min_tokens_and_ignore_eos_do_not_prevent_the_end_of_a_grammar(make_rig):
    rig = make_rig()
    params = SamplingParams(min_tokens=50, ignore_eos=True)
    rig.add("short", [1], max_new_tokens=80, grammar=grammar("AB CD"), params=params)
    rig.run()
    assert_right(rig, "short", "AB CD")
    assert len(rig.tokens["short"]) == 3


# -- Failures that end only their request


def failing(error):
    future = Future()
    future.set_exception(error)
    return future


class Broken(CompiledGrammar):
    """A grammar whose matcher executes a given function at one of its calls."""

    def __init__(self, call, after, action):
        self.call, self.after, self.action = call, after, action

    def matcher(self):
        if self.call == "matcher":
            return self.action()
        return BrokenMatcher(compiled().result().matcher(), self)


class BrokenMatcher(GrammarMatcher):
    def __init__(self, inner, plan):
        self.inner, self.plan, self.num_accepted = inner, plan, 0

    def _now(self, call):
        return self.plan.call == call and self.num_accepted == self.plan.after

    def accept(self, token_id):
        if self._now("accept"):
            return self.plan.action()
        self.num_accepted += 1
        accepted = self.inner.accept(token_id)
        if self._now("after accept"):
            self.plan.action()
        return accepted

    def fill_bitmask(self, mask, row):
        self.inner.fill_bitmask(mask, row)
        if self._now("fill_bitmask"):
            mask[row] = self.plan.action()

    def rollback(self, num_tokens):
        if self._now("rollback"):
            self.plan.action()
        self.num_accepted -= num_tokens
        self.inner.rollback(num_tokens)

    def forced_text(self):
        return ""

    def forced_tokens(self):
        return []

    @property
    def finished(self):
        return self.inner.finished


def broken(*args):
    future = Future()
    future.set_result(Broken(*args))
    return future


def divide():
    return 1 // 0


class Panic(BaseException):
    """An exception like those that Rust libraries raise for a panic."""


def panic():
    raise Panic("oops")


def refuse():
    raise GrammarError("oops")


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(
    ("future", "num_tokens", "said"),
    [
        (failing(GrammarError("regex: no")), 0, "regex: no"),
        (failing(ZeroDivisionError("oops")), 0, "the grammar backend failed: ZeroDivisionError: oops"),
        (broken("matcher", 0, divide), 0, "the grammar backend failed: ZeroDivisionError: "),
        (broken("fill_bitmask", 0, divide), 0, "the grammar backend failed: ZeroDivisionError: "),
        (failing(Panic("oops")), 0, "the grammar backend failed: Panic: oops"),
        (broken("matcher", 0, panic), 0, "the grammar backend failed: Panic: oops"),
        (broken("fill_bitmask", 0, panic), 0, "the grammar backend failed: Panic: oops"),
        (broken("fill_bitmask", 3, panic), 3, "the grammar backend failed: Panic: oops"),
        (broken("accept", 2, panic), 3, "the grammar backend failed: Panic: oops"),
        (broken("accept", 2, sys.exit), 3, "the grammar backend failed: SystemExit: "),
        (broken("fill_bitmask", 0, lambda: 0), 0, "no token is allowed next"),
        (broken("fill_bitmask", 3, lambda: 0), 3, "no token is allowed next"),
        (broken("fill_bitmask", 3, divide), 3, "the grammar backend failed: ZeroDivisionError: "),
        (broken("accept", 2, divide), 3, "the grammar backend failed: ZeroDivisionError: "),
        (broken("accept", 2, lambda: False), 3, "the grammar backend rejects token"),
    ],
)
def test_a_grammar_that_fails_ends_only_its_request(make_rig, overlap, future, num_tokens, said):
    rig = make_rig(overlap=overlap)
    rig.add("bad", [1, 2], max_new_tokens=20, grammar=under(future))
    rig.add("good", [1, 3], max_new_tokens=20, grammar=grammar())
    rig.add("free", [1, 4], max_new_tokens=20)
    rig.run()
    assert rig.finish("bad").reason is FinishReason.ERROR
    assert said in rig.finish("bad").error
    assert len(rig.tokens["bad"]) == num_tokens
    assert_right(rig, "good")
    rig.assert_right("free")
    assert rig.scheduler.kv.usage.owned == rig.scheduler.kv.usage.locked == 0


class DraftsRight(Drafter):
    """Drafts what the device samples under `WORDS` after a prompt of 2 tokens."""

    def propose(self, requests):
        drafts = []
        for request in requests:
            prompt, output = np.split(request.token_ids, [2])
            whole = expected_output(prompt.tolist(), 20, VOCAB, compiled().result().matcher())
            drafted = whole[len(output) :][: request.limit]
            drafts.append(Draft(np.array(drafted, dtype=np.int32), 0.9) if drafted else None)
        return drafts


def right_speculator(max_drafts=8):
    return Speculator({"right": DraftsRight()}, max_drafts, VOCAB, AllDrafts(max_drafts))


class Once:
    """A function that executes an action at its first call only."""

    def __init__(self, action):
        self.action, self.num_calls = action, 0

    def __call__(self):
        self.num_calls += 1
        return self.action() if self.num_calls == 1 else None


@pytest.mark.parametrize("call", ["accept", "fill_bitmask"])
@pytest.mark.parametrize("action", [divide, panic])
def test_a_grammar_that_fails_along_a_draft_continues_from_its_state(call, action):
    broken_once = Broken(call, 3, Once(action))
    future = Future()
    future.set_result(broken_once)
    bound = under(future)
    assert bound.start(0.0)
    assert not bound.accept(0)
    before, after = (np.zeros(bound.num_words, dtype=np.int32) for _ in range(2))
    bound.fill(before)
    with pytest.raises(RequestFailedError, match="the grammar backend failed"):
        bound.masks_along([5, 10, 0, 6])
    bound.fill(after)
    assert after.tolist() == before.tolist()


def test_a_token_that_was_accepted_before_the_backend_failed_is_rolled_back():
    future = Future()
    future.set_result(Broken("after accept", 3, Once(divide)))
    bound = under(future)
    assert bound.start(0.0)
    assert not bound.accept(0)
    before, after = (np.zeros(bound.num_words, dtype=np.int32) for _ in range(2))
    bound.fill(before)
    with pytest.raises(RequestFailedError, match="the grammar backend failed"):
        bound.masks_along([5, 10, 0, 6])
    bound.fill(after)
    assert after.tolist() == before.tolist()


def test_the_masks_of_a_draft_begin_with_that_of_its_first_token():
    bound, first = grammar(), np.zeros(-(-VOCAB // 32), dtype=np.int32)
    assert bound.start(0.0)
    bound.fill(first)
    masks = bound.masks_along([0, 5])
    assert masks.shape == (3, len(first))
    assert masks[0].tolist() == first.tolist()
    assert bound.masks_along([VOCAB - 1]).shape == (1, len(first))


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("action", [divide, panic, refuse])
def test_a_grammar_whose_rollback_fails_ends_only_its_request(make_rig, overlap, action):
    rig = make_rig(overlap=overlap, speculator=right_speculator())
    rig.add("bad", [1, 2], max_new_tokens=20, grammar=under(broken("rollback", 9, action)))
    rig.add("good", [1, 3], max_new_tokens=20, grammar=grammar())
    rig.run()
    assert rig.finish("bad").reason is FinishReason.ERROR
    assert "the grammar's state was lost, because 8 tokens were not rolled back" in rig.finish("bad").error
    assert rig.tokens["bad"] == right_tokens(rig.requests["bad"])[: len(rig.tokens["bad"])]
    assert_right(rig, "good")
    assert rig.scheduler.kv.usage.owned == rig.scheduler.kv.usage.locked == 0


@pytest.mark.parametrize("timeout_s", [None, 0.5])
def test_a_request_that_waits_too_long_ends(make_rig, timeout_s):
    rig = make_rig()
    rig.add("late", [1], grammar=under(Future(), 1.0), timeout_s=timeout_s)
    rig.step()
    assert rig.scheduler.next_deadline_s == (timeout_s or 1.0)
    rig.now = 0.999 if timeout_s is None else 0.499
    rig.loop.step()
    assert rig.updates["late"] == []
    rig.now = 1.0
    rig.step()
    finish = rig.finish("late")
    if timeout_s is None:
        assert finish.reason is FinishReason.ERROR
        assert "was not compiled in time" in finish.error
    else:
        assert finish.reason is FinishReason.ABORT
    assert not rig.scheduler.has_work
    assert rig.scheduler.next_deadline_s is None


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("num_steps", range(5))
def test_an_abort_at_any_step_frees_everything(make_rig, overlap, num_steps):
    rig = make_rig(overlap=overlap, prefill_tokens=8)
    rig.add("victim", range(12), max_new_tokens=20, grammar=grammar())
    rig.add("unready", range(12), grammar=under(Future()))
    rig.add("other", range(12), max_new_tokens=20, grammar=grammar())
    for _ in range(num_steps):
        rig.step()
    rig.loop.abort("victim", "gone")
    rig.loop.abort("unready", "gone")
    rig.run()
    assert rig.tokens["victim"] == right_tokens(rig.requests["victim"])[: len(rig.tokens["victim"])]
    assert rig.finish("unready").reason is rig.finish("victim").reason is FinishReason.ABORT
    assert_right(rig, "other")
    assert rig.scheduler.kv.usage.owned == rig.scheduler.kv.usage.locked == 0
    assert rig.scheduler.next_deadline_s is None


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("bad_step", [0, 1, 3])
def test_a_failed_step_fails_only_its_requests(make_rig, overlap, bad_step):
    rig = make_rig(num_pages=512, num_rows=2, overlap=overlap)
    rig.device.fail_steps = {bad_step}
    for i in range(6):
        rig.add(f"r{i}", [*range(9), i], max_new_tokens=12, grammar=grammar())
    rig.run()
    failed = [r for r in rig.requests if rig.finish(r).reason is FinishReason.ERROR]
    assert 1 <= len(failed) <= 2
    for request_id in rig.requests:
        if request_id not in failed:
            assert_right(rig, request_id)


# -- The loop


class CountingLoop(StepLoop):
    """Counts its steps."""

    num_steps = 0

    def step(self):
        self.num_steps += 1
        return super().step()


def test_the_loop_sleeps_while_it_waits_only_for_grammars(make_rig):
    rig = make_rig(loop_class=CountingLoop)
    loop = rig.loop
    thread = EngineThread(loop)
    future, ended = Future(), threading.Event()
    request = rig.make_request("r", range(5), grammar=under(future))
    tokens = []

    def sink(update):
        tokens.extend(update.token_ids)
        if update.finish:
            ended.set()

    try:
        thread.submit([[(request, sink)]]).result(timeout=10)
        for _ in range(5):
            thread.call(lambda: None).result(timeout=10)
        assert loop.num_steps <= 7  # one step for each call, and none in between
        assert tokens == []
        future.set_result(compiled().result())
        assert ended.wait(timeout=10)
        assert tokens == right_tokens(request)
    finally:
        thread.close()


def test_idle_time_is_the_time_until_the_next_deadline(make_rig):
    rig = make_rig()
    assert rig.loop.idle_s is None
    rig.add("r", [1], grammar=under(Future(), 2.5))
    assert rig.loop.idle_s == 0.0
    rig.loop.step()
    assert rig.loop.idle_s == pytest.approx(2.5)
    rig.add("other", [2])
    rig.loop.step()
    assert rig.loop.idle_s == 0.0


def test_plans_have_masks_only_for_constrained_rows(make_rig):
    rig = make_rig()
    rig.add("free", [1, 2], max_new_tokens=3)
    rig.add("bound", [3, 4], max_new_tokens=3, grammar=grammar("AB CD EF"))
    rig.step()
    (plan,) = rig.plans
    assert plan.token_mask.idx.tolist() == [1]
    allowed = np.flatnonzero(np.unpackbits(plan.token_mask.wait().bits.view(np.uint8), bitorder="little"))
    assert allowed.tolist() == [0, 1]
    rig.run()
    assert rig.plans[-1].token_mask is not None
    rig.add("alone", [5], max_new_tokens=2)
    rig.run()
    assert rig.plans[-1].token_mask is None
