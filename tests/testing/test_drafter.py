"""The conformance kit of drafters finds what is broken on purpose; a scripted drafter does what its script says."""

import numpy as np
import pytest

from graftlm.contracts import Draft, Drafter, DraftRequest
from graftlm.testing import DrafterConformance, ScriptedDrafter, run_conformance
from graftlm.testing.drafter import SCRIPTS

VOCAB = 40


def draft(token_ids, confidence=0.5, dtype=np.int32):
    return Draft(np.array(token_ids, dtype=dtype), confidence)


class Repeats(Drafter):
    """Drafts the latest token again; with mistakes, in the classes below."""

    def propose(self, requests):
        return [self.draft(request) for request in requests]

    def draft(self, request):
        return draft([request.token_ids[-1]])


class ForgetsOne(Repeats):
    def propose(self, requests):
        return super().propose(requests)[:-1]


class NeedsRequests(Repeats):
    def propose(self, requests):
        return super().propose(requests) if requests else [None]


class TooLong(Repeats):
    def draft(self, request):
        return draft([1] * (request.limit + 1))


class Empty(Repeats):
    def draft(self, request):
        return draft([])


class Wide(Repeats):
    def draft(self, request):
        return draft([1], dtype=np.int64)


class Outside(Repeats):
    def draft(self, request):
        return draft([VOCAB])


class Sure(Repeats):
    def draft(self, request):
        return draft([1], confidence=100.0)


class Sorts(Repeats):
    def draft(self, request):
        request.token_ids.sort()
        return super().draft(request)


class KeepsArrays(Repeats):
    """Drafts the last token of the row's first call."""

    def __init__(self):
        self.first = {}

    def draft(self, request):
        return super().draft(self.first.setdefault(request.row, request))

    def close(self, row):
        self.first.pop(row, None)


class KeepsRows(Repeats):
    """Drafts what the row began with."""

    def __init__(self):
        self.first = {}

    def draft(self, request):
        return draft([self.first.setdefault(request.row, int(request.token_ids[0]))])


class Gossips(Repeats):
    """Drafts what any request said last."""

    def __init__(self):
        self.last = None

    def draft(self, request):
        said, self.last = self.last, request.token_ids[-1]
        return None if said is None else draft([said])


class Hoards(Repeats):
    """Drafts the first token of the text that was cached last, although it may have been removed."""

    def __init__(self):
        self.texts = {}

    def cache_event(self, event):
        if event.kind == "stored":
            self.texts[event.namespace] = event.token_ids

    def draft(self, request):
        text = self.texts.get(request.namespace)
        return None if text is None else draft(text[:1])


class Overhears(Hoards):
    """Drafts the first token of the text that was cached last in any namespace."""

    def cache_event(self, event):
        self.texts = {} if event.kind in ("removed", "cleared") else {"": event.token_ids}


def failed(make):
    class Kit(DrafterConformance):
        def create(self, context):
            return make()

    return {result.name.partition("[")[0] for result in run_conformance(Kit) if result.error}


def test_a_drafter_that_keeps_the_contract_passes():
    assert failed(Repeats) == set()


@pytest.mark.parametrize(
    ("broken", "sentence"),
    [
        (ForgetsOne, "test_there_is_one_entry_per_request"),
        (NeedsRequests, "test_there_is_one_entry_per_request"),
        (TooLong, "test_drafts_are_within_their_limits"),
        (Empty, "test_drafts_are_within_their_limits"),
        (Wide, "test_drafts_are_within_their_limits"),
        (Outside, "test_drafts_are_within_their_limits"),
        (Sure, "test_drafts_are_within_their_limits"),
        (Sorts, "test_tokens_are_not_changed"),
        (KeepsArrays, "test_arrays_of_earlier_calls_are_not_used"),
        (Gossips, "test_other_namespaces_change_nothing"),
        (Hoards, "test_removed_texts_are_not_drafted"),
        (Overhears, "test_other_namespaces_change_nothing"),
        (KeepsRows, "test_a_closed_row_starts_anew"),
    ],
)
def test_a_broken_drafter_is_found(broken, sentence):
    assert sentence in failed(broken)


def answers(script, limit=5):
    """Return what a script drafts where the tokens to come are 1, 2, 3 and so on."""
    drafter = ScriptedDrafter(lambda request, num_tokens: range(1, num_tokens + 1), [script], VOCAB)
    return drafter.propose([DraftRequest(row, "", np.zeros(3, dtype=np.int32), limit) for row in range(20)])


@pytest.mark.parametrize(
    ("script", "is_expected"),
    [
        ("right", lambda ids: ids == list(range(1, len(ids) + 1))),
        ("wrong", lambda ids: ids[0] != 1),
        ("partly", lambda ids: ids[:-1] == list(range(1, len(ids))) and ids[-1] != len(ids)),
        ("too_long", lambda ids: len(ids) == 12),
        ("random", lambda ids: max(ids) < VOCAB),
        ("outside", lambda ids: ids[-1] >= VOCAB),
    ],
)
def test_a_scripted_drafter_follows_its_script(script, is_expected):
    for found in answers(script):
        assert is_expected(found.token_ids.tolist())


def test_a_scripted_drafter_breaks_the_contract_where_the_script_says_so():
    assert set(answers("none")) == {None}
    assert answers("too_few") == []
    assert not any(isinstance(found, Draft) for found in answers("not_drafts"))
    with pytest.raises(RuntimeError, match="the script says so"):
        answers("raises")
    assert set(SCRIPTS) >= {"none", "too_few", "not_drafts", "raises"}
