"""Drafts never contain what another namespace wrote, although tenants repeat each other's prompts and answers."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from graftlm.contracts import DraftRequest, PrefixKey
from graftlm.speculation import Speculator
from graftlm.testing import CacheRig
from graftlm.testing.drafter import AllDrafts
from graftlm_cache.radix import RadixCache
from graftlm_speculation.options import SuffixOptions
from graftlm_speculation.radix import RadixDrafter
from graftlm_speculation.suffix import SuffixDrafter

TENANTS = ("", "a", "b")
VOCAB = 4
LIMIT = 6
MIN_MATCH = 2

#: Phrases that tenants make their texts of, so that most texts begin like another tenant's.
PHRASES = ((0, 1, 2), (0, 1, 3), (1, 1), (2, 3, 3, 0))
TEXTS = st.lists(st.sampled_from(PHRASES), min_size=1, max_size=5).map(
    lambda parts: [t for part in parts for t in part]
)
EVENTS = st.lists(
    st.tuples(st.sampled_from(["finish", "finish", "ask", "ask", "match", "evict"]), st.sampled_from(TENANTS), TEXTS),
    min_size=1,
    max_size=25,
)


class Server:
    """A cache and the built-in drafters; requests leave their texts in the cache when they finish."""

    def __init__(self, page_size):
        self.page_size = page_size
        self.rig = CacheRig(RadixCache, page_size)
        drafters = {
            "radix": RadixDrafter(self.rig.cache.continuation),
            "suffix": SuffixDrafter(SuffixOptions(min_match_tokens=MIN_MATCH, min_cached_match_tokens=MIN_MATCH)),
        }
        self.num_events = 0
        self.speculator = Speculator(drafters, LIMIT, VOCAB, AllDrafts(LIMIT))
        self.finished = {tenant: [] for tenant in TENANTS}
        self.drafts = []  # (tenant, drafter, text, drafted tokens)

    def handle(self, kind, tenant, text):
        key = PrefixKey(np.array(text, dtype=np.int32), tenant)
        if kind == "finish":
            self.rig.insert(key)
            self.finished[tenant].append(text)
        elif kind == "match":
            self.rig.cache.match(key)
        elif kind == "evict":
            self.rig.cache.evict(2)
        else:
            self.ask(tenant, text)
        for event in self.rig.events[self.num_events :]:
            self.speculator.cache_event(event)
        self.num_events = len(self.rig.events)

    def ask(self, tenant, text):
        """Draft for each start of a text, in one batch."""
        starts = [np.array(text[:length], dtype=np.int32) for length in range(1, len(text) + 1)]
        requests = [DraftRequest(row, tenant, start, LIMIT) for row, start in enumerate(starts)]
        found = self.speculator.propose(requests)
        for request in requests:
            draft = found.get(request.row)
            drafted = (None, []) if draft is None else (draft.drafter, draft.token_ids.tolist())
            self.drafts.append((tenant, drafted[0], request.token_ids.tolist(), drafted[1]))
            self.speculator.close(request.row)


def is_in(text, drafted, others):
    """Return whether other texts contain the latest tokens of a text, followed by the drafted tokens."""
    part = text[-MIN_MATCH:] + drafted
    return any(part == other[i : i + len(part)] for other in others for i in range(len(other) - len(part) + 1))


def is_repetition(text, drafted):
    """Return whether a text goes on as it did after an earlier occurrence of its latest tokens."""
    whole = text + drafted
    return any(
        text[end - MIN_MATCH : end] == text[-MIN_MATCH:] and whole[end : end + len(drafted)] == drafted
        for end in range(MIN_MATCH, len(text))
    )


@settings(deadline=None, max_examples=200)
@given(page_size=st.sampled_from([1, 2, 4]), events=EVENTS)
def test_every_draft_is_explained_by_the_requests_own_namespace(page_size, events):
    server = Server(page_size)
    for kind, tenant, text in events:
        server.handle(kind, tenant, text)
        for asked_by, drafter, start, drafted in server.drafts:
            if drafter == "radix":
                whole = start + drafted
                assert any(own[: len(whole)] == whole for own in server.finished[asked_by])
            elif drafter == "suffix":
                assert is_repetition(start, drafted) or is_in(start, drafted, server.finished[asked_by])
        server.drafts.clear()


@settings(deadline=None, max_examples=200)
@given(page_size=st.sampled_from([1, 2, 4]), events=EVENTS, tenant=st.sampled_from(TENANTS))
def test_drafts_are_the_same_if_the_other_namespaces_never_existed(page_size, events, tenant):
    shared, alone = Server(page_size), Server(page_size)
    for kind, owner, text in events:
        if kind == "evict":  # memory is common to all, so that what is evicted depends on all
            continue
        shared.handle(kind, owner, text)
        if owner == tenant:
            alone.handle(kind, owner, text)
    assert [one for one in shared.drafts if one[0] == tenant] == alone.drafts


def test_the_texts_of_these_tests_have_drafts_of_both_kinds():
    server = Server(2)
    text = [0, 1, 2, 0, 1, 3, 1, 1, 2, 3, 3, 0]
    server.handle("ask", "a", text)
    server.handle("finish", "a", text)
    server.handle("ask", "b", text)
    assert {drafter for _, drafter, _, drafted in server.drafts if drafted} == {"suffix"}
    assert not any(drafted for _, _, start, drafted in server.drafts if start == text[:4])
    server.drafts.clear()
    server.handle("ask", "a", text)
    assert {drafter for _, drafter, _, drafted in server.drafts if drafted} == {"radix"}
    server.drafts.clear()
    server.handle("ask", "a", text[2:])
    assert {drafter for _, drafter, _, drafted in server.drafts if drafted} == {"suffix"}
    assert ("a", "suffix", text[2:5], text[5:11]) in server.drafts
