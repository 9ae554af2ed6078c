import numpy as np
import pytest

from graftlm.contracts import Draft, Drafter, DraftRequest
from graftlm.records import CacheEvent
from graftlm.speculation import DraftCounts, SourcedDraft, Speculator
from graftlm.speculation.draft_budget import DraftBudget
from graftlm.speculation.step_costs import StepCosts
from graftlm.testing.drafter import AllDrafts

VOCAB = 50


class Knows(Drafter):
    """Drafts what it is told for some rows, and notes what it is asked."""

    def __init__(self, drafts=None):
        self.drafts = drafts or {}
        self.asked = []
        self.closed = []

    def propose(self, requests):
        self.asked.append([request.row for request in requests])
        return [self.drafts.get(request.row) for request in requests]

    def close(self, row):
        self.closed.append(row)


class Panic(BaseException):
    """An exception like those that Rust libraries raise for a panic."""


class FailsFor(Knows):
    """Fails whenever a row is among those it is asked for, and at each `close`."""

    def __init__(self, row, drafts, error=RuntimeError):
        super().__init__(drafts)
        self.row = row
        self.error = error

    def propose(self, requests):
        answers = super().propose(requests)
        if self.row in self.asked[-1]:
            raise self.error("broken on purpose")
        return answers

    def close(self, row):
        super().close(row)
        raise self.error("broken on purpose, too")


class Returns(Drafter):
    """Returns the same for whatever it is asked."""

    def __init__(self, answers):
        self.answers = answers

    def propose(self, requests):
        return self.answers


def draft(*token_ids, confidence=0.5, dtype=np.int32):
    return Draft(np.array(token_ids, dtype=dtype), confidence)


def requests(*rows, limit=8):
    return [DraftRequest(row, "", np.arange(3, dtype=np.int32), limit) for row in rows]


def speculator(max_drafts=8, budget=None, **drafters):
    return Speculator(drafters, max_drafts, VOCAB, budget or AllDrafts(max_drafts))


def tokens_of(drafts):
    return {row: (found.drafter, found.token_ids.tolist()) for row, found in drafts.items()}


def test_each_drafter_is_asked_where_those_before_it_have_no_draft():
    first, second = Knows({1: draft(11)}), Knows({1: draft(21), 2: draft(22)})
    third = Knows({1: draft(31), 2: draft(32)})
    found = speculator(first=first, second=second, third=third).propose(requests(1, 2, 3))
    assert tokens_of(found) == {1: ("first", [11]), 2: ("second", [22])}
    assert (first.asked, second.asked, third.asked) == ([[1, 2, 3]], [[2, 3]], [[3]])


def test_a_drafter_is_not_asked_for_no_requests():
    first, second = Knows({1: draft(11)}), Knows()
    one = speculator(first=first, second=second)
    one.propose(requests(1))
    one.propose([])
    assert (first.asked, second.asked) == ([[1]], [])


def test_a_draft_is_cut_to_its_limit():
    found = speculator(first=Knows({1: draft(1, 2, 3, 4)})).propose(requests(1, limit=3))
    assert tokens_of(found) == {1: ("first", [1, 2, 3])}


def test_tokens_past_the_limit_need_not_be_valid():
    found = speculator(first=Knows({1: draft(1, 2, VOCAB + 9)})).propose(requests(1, limit=2))
    assert tokens_of(found) == {1: ("first", [1, 2])}


def test_an_empty_draft_is_none_and_the_next_drafter_is_asked(caplog):
    found = speculator(first=Knows({1: draft()}), second=Knows({1: draft(5)})).propose(requests(1))
    assert tokens_of(found) == {1: ("second", [5])}
    assert not caplog.records


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        ([], "ValueError: propose() returned 0 entries for 1 requests"),
        ([None, None], "ValueError: propose() returned 2 entries for 1 requests"),
        (None, "TypeError"),
        (["text"], "TypeError: propose() returned str, expected Draft or None"),
        ([draft(1, dtype=np.int64)], "TypeError: a draft is int64 [1], expected int32 [n]"),
        ([draft([1, 2])], "TypeError: a draft is int32 [1, 2], expected int32 [n]"),
        ([draft(1, VOCAB)], "ValueError: a draft has tokens outside the vocabulary of 50"),
        ([draft(-1)], "ValueError: a draft has tokens outside the vocabulary of 50"),
        ([draft(1, confidence=1.5)], "ValueError: a draft's confidence is 1.5, expected 0 to 1"),
        ([draft(1, confidence=float("nan"))], "ValueError: a draft's confidence is nan, expected 0 to 1"),
    ],
)
def test_what_is_no_draft_is_refused_and_the_next_drafter_is_asked(answers, message, caplog):
    one = speculator(broken=Returns(answers), works=Knows({1: draft(7)}))
    assert tokens_of(one.propose(requests(1))) == {1: ("works", [7])}
    assert f"drafter 'broken' failed; the request continues without drafts of this drafter: {message}" in caplog.text


@pytest.mark.parametrize("error", [RuntimeError, Panic])
def test_only_the_request_that_a_drafter_fails_for_goes_on_without_it(caplog, error):
    broken = FailsFor(2, {1: draft(1), 2: draft(2), 3: draft(3)}, error)
    one = speculator(broken=broken, works=Knows({2: draft(9)}))
    expected = {1: ("broken", [1]), 2: ("works", [9]), 3: ("broken", [3])}
    assert tokens_of(one.propose(requests(1, 2, 3))) == expected
    assert broken.asked == [[1, 2, 3], [1], [2], [3]]
    assert tokens_of(one.propose(requests(1, 2, 3))) == expected
    assert broken.asked[4:] == [[1, 3]]
    assert len(caplog.records) == 1


@pytest.mark.parametrize("error", [RuntimeError, Panic])
def test_the_next_request_of_a_row_may_use_the_drafter_again(caplog, error):
    broken = FailsFor(2, {2: draft(2)}, error)
    one = speculator(broken=broken)
    assert one.propose(requests(2)) == {}
    one.close(2)
    assert "drafter 'broken' failed to close a request" in caplog.text
    broken.row = None
    assert tokens_of(one.propose(requests(2))) == {2: ("broken", [2])}


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_of_a_drafter_is_raised(error):
    one = speculator(broken=FailsFor(2, {}, error))
    with pytest.raises(error):
        one.propose(requests(2))
    with pytest.raises(error):
        one.close(2)


def test_every_drafter_hears_of_closed_rows_that_were_asked_for(caplog):
    broken, second = FailsFor(None, {}), Knows()
    one = speculator(broken=broken, second=second)
    one.propose(requests(1, 2))
    for row in (1, 5, 1):
        one.close(row)
    assert (broken.closed, second.closed) == ([1], [1])


@pytest.mark.parametrize("error", [RuntimeError, Panic])
def test_a_drafter_that_fails_to_process_a_cache_event_is_not_called_again(caplog, error):
    class Listens(Knows):
        def __init__(self, drafts):
            super().__init__(drafts)
            self.events = []

        def cache_event(self, event):
            self.events.append(event)

    class Breaks(Listens):
        def cache_event(self, event):
            super().cache_event(event)
            raise error("broken on purpose")

    broken, works = Breaks({1: draft(1)}), Listens({1: draft(2)})
    one = speculator(broken=broken, works=works)
    events = [CacheEvent("cleared", 0), CacheEvent("cleared", 1)]
    for event in events:
        one.cache_event(event)
    assert (broken.events, works.events) == (events[:1], events)
    assert tokens_of(one.propose(requests(1))) == {1: ("works", [2])}
    assert broken.asked == []
    assert "drafter 'broken' failed to process a cache event; it is not called again" in caplog.text


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_of_a_cache_event_is_raised(error):
    class Interrupts(Knows):
        def cache_event(self, event):
            raise error

    with pytest.raises(error):
        speculator(broken=Interrupts()).cache_event(CacheEvent("cleared", 0))


def test_drafts_are_counted_by_drafter():
    one = speculator(first=Knows(), second=Knows())
    four, two = (SourcedDraft("first", np.arange(num, dtype=np.int32), 0.5) for num in (4, 2))
    one.observe(1, four, 3)
    one.count_output(four, 2)
    one.observe(2, two, 0)
    one.count_output(two, 0)
    assert one.counts == {"first": DraftCounts(6, 2), "second": DraftCounts(0, 0)}


def test_choose_cuts_drafts_to_what_the_budget_allows():
    class OneToken(DraftBudget):
        def lengths(self, num_rows, probabilities, limits):
            assert (num_rows, list(limits)) == (5, [3, 2])
            return [1, 0]

    one = speculator(budget=OneToken(StepCosts(), 8), first=Knows({1: draft(1, 2, 3), 2: draft(4, 5)}))
    chosen = one.choose(5, one.propose(requests(1, 2)))
    assert tokens_of(chosen) == {1: ("first", [1])}
    assert one.choose(5, {}) == {}


def cheap_steps(one):
    """Let a speculator learn that further tokens cost little."""
    for _ in range(30):
        one.costs.observe(1, 0.010)
        one.costs.observe(9, 0.011, has_drafts=True)


def steps_until_no_draft(num_accepted_of, max_steps=200):
    """Verify drafts of 8 tokens on a device where tokens cost little; return the step from which none is chosen."""
    one = Speculator({"first": Knows({1: draft(*range(8), confidence=0.9)})}, 8, VOCAB)
    cheap_steps(one)
    for step in range(max_steps):
        chosen = one.choose(1, one.propose(requests(1)))
        if not chosen:
            return step
        one.observe(1, chosen[1], num_accepted_of(len(chosen[1].token_ids)))
    return max_steps


def test_drafts_stop_when_none_is_accepted():
    assert 0 < steps_until_no_draft(lambda num_drafted: 0) < 40


def test_drafts_go_on_while_they_are_accepted():
    assert steps_until_no_draft(lambda num_drafted: num_drafted) == 200


def test_rejected_drafters_are_tried_again_now_and_then():
    one = Speculator({"first": Knows({1: draft(*range(8), confidence=0.9)})}, 8, VOCAB)
    cheap_steps(one)
    drafted = {False: 0, True: 0}
    for step in range(6000):
        is_right = step >= 3000
        for row, chosen in one.choose(1, one.propose(requests(1))).items():
            num_drafted = len(chosen.token_ids)
            drafted[is_right] += num_drafted
            one.observe(row, chosen, num_drafted if is_right else 0)
    assert 10 < drafted[False] < 0.05 * 8 * 3000  # of tokens that are nearly free
    assert drafted[True] > 0.9 * 8 * 3000


def test_a_drafter_that_is_wrong_costs_another_one_nothing():
    one = Speculator({"first": Knows({1: draft(*range(8))}), "second": Knows({1: draft(*range(8))})}, 8, VOCAB)
    cheap_steps(one)
    (chosen,) = one.choose(1, one.propose(requests(1))).values()
    for _ in range(30):
        one.observe(1, SourcedDraft("second", chosen.token_ids, 0.5), 0)
    assert one.choose(1, one.propose(requests(1)))[1].token_ids.tolist() == chosen.token_ids.tolist()


def test_a_drafter_may_reuse_its_array():
    array = np.arange(3, dtype=np.int32)
    one = speculator(first=Knows({1: Draft(array, 0.9)}))
    proposed = one.propose(requests(1))
    array[:] = 7
    assert tokens_of(proposed) == {1: ("first", [0, 1, 2])}


def test_no_drafter_is_worth_asking_where_tokens_are_expensive():
    assert Speculator({"first": Knows()}, 8, VOCAB).may_pay(1)
    one = Speculator({"first": Knows()}, 8, VOCAB)
    for _ in range(60):
        one.costs.observe(1, 0.010)
        for num_tokens in range(2, 10):
            one.costs.observe(num_tokens, 0.012 * num_tokens, has_drafts=True)
    assert not one.may_pay(1)


class Afterwards(Knows):
    """A drafter that needs the values of all tokens."""

    drafts_ahead = False
    num_page_tokens = 4


def propose(speculator, rows, limit=8, *, in_flight):
    requests = [DraftRequest(row, "", np.arange(3, dtype=np.int32), limit) for row in rows]
    found = speculator.propose(requests, in_flight=in_flight)
    return {row: (len(d.token_ids), d.confidence, d.is_expected) for row, d in found.items()}


def test_while_a_step_is_in_flight_a_draft_like_the_previous_one_is_expected():
    drafter = Afterwards({1: Draft(np.array([4, 5, 6], dtype=np.int32), 0.8)})
    speculator = Speculator({"knows": Knows(), "after": drafter}, 8, VOCAB, AllDrafts())
    assert propose(speculator, [1, 2], in_flight=True) == {1: (5, 0.5, True), 2: (5, 0.5, True)}
    assert drafter.asked == []
    assert propose(speculator, [1, 2], in_flight=False) == {1: (3, 0.8, False)}
    assert propose(speculator, [1, 2], in_flight=True) == {1: (4, 0.8, True), 2: (2, 0.2, True)}
    assert propose(speculator, [1], limit=2, in_flight=True) == {1: (2, 0.8, True)}
    speculator.close(1)
    assert propose(speculator, [1], in_flight=True) == {1: (5, 0.5, True)}


def test_a_failed_drafter_is_expected_to_have_no_draft():
    drafter = Afterwards({1: "no draft"})
    speculator = Speculator({"after": drafter}, 8, VOCAB, AllDrafts())
    assert propose(speculator, [1], in_flight=False) == {}
    assert propose(speculator, [1], in_flight=True) == {}


def test_slots_are_allocated_for_the_drafter_that_writes_most():
    assert Speculator({"knows": Knows()}, 8, VOCAB).num_page_tokens == 0
    assert Speculator({"knows": Knows(), "after": Afterwards()}, 8, VOCAB).num_page_tokens == 4
