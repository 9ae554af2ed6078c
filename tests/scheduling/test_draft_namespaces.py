"""The built-in drafters under a scheduler whose tenants ask each other's questions: nothing of one reaches another."""

import random

import numpy as np
import pytest

from graftlm.contracts import Drafter
from graftlm.speculation import Speculator
from graftlm.testing.drafter import AllDrafts
from graftlm_speculation.options import SuffixOptions
from graftlm_speculation.radix import RadixDrafter
from graftlm_speculation.suffix import SuffixDrafter

VOCAB = 50
MAX_DRAFTS = 6


class Watched(Drafter):
    """A drafter whose drafts are explained, when they are made, by what its namespace has said so far."""

    def __init__(self, inner, rig):
        self.inner, self.rig = inner, rig
        self.num_drafts = 0
        self.unexplained = []  # a drafter that raises is left out, so its drafts are noted

    def propose(self, requests):
        drafts = self.inner.propose(requests)
        for request, draft in zip(requests, drafts, strict=True):
            if draft is not None:
                self.num_drafts += 1
                drafted = draft.token_ids.tolist()
                if not self.is_explained(request, drafted):
                    self.unexplained.append((request.namespace, request.token_ids.tolist(), drafted))
        return drafts

    def is_explained(self, request, drafted):
        start = request.token_ids.tolist()
        own = [known.token_ids.tolist() for known in self.rig.requests.values() if known.namespace == request.namespace]
        if isinstance(self.inner, RadixDrafter):
            whole = start + drafted
            return any(text[: len(whole)] == whole for text in own)
        return start in own and set(drafted) <= set(start)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("seed", range(3))
def test_every_draft_is_explained_by_the_requests_own_namespace(make_rig, overlap, page_size, seed):
    draw = random.Random(seed)
    rig = make_rig(overlap=overlap, page_size=page_size, num_pages=400 // page_size)
    radix = Watched(RadixDrafter(lambda key, num: rig.scheduler.kv.cache.continuation(key, num)), rig)
    suffix = Watched(SuffixDrafter(SuffixOptions(min_match_tokens=1)), rig)
    rig.use(Speculator({"radix": radix, "suffix": suffix}, MAX_DRAFTS, VOCAB, AllDrafts(MAX_DRAFTS)))
    questions = [[draw.randrange(VOCAB) for _ in range(draw.randint(1, 12))] for _ in range(4)]
    for i in range(40):
        tenant = draw.choice(["", "a", "b"])
        rig.add(f"r{i}", draw.choice(questions), max_new_tokens=draw.randint(1, 40), namespace=tenant)
        for _ in range(draw.randint(0, 12)):
            rig.step()
    rig.run()
    for i in range(40):
        rig.assert_right(f"r{i}")
    assert radix.unexplained == suffix.unexplained == []
    assert radix.num_drafts > 20
    assert suffix.num_drafts > 20


def test_the_first_answer_of_a_namespace_is_not_drafted_from_the_cache(make_rig):
    rig = make_rig()
    radix = Watched(RadixDrafter(lambda key, num: rig.scheduler.kv.cache.continuation(key, num)), rig)
    rig.use(Speculator({"radix": radix}, MAX_DRAFTS, VOCAB, AllDrafts(MAX_DRAFTS)))
    for name, namespace, num_drafts in (("first", "a", 0), ("other", "b", 0), ("again", "a", 4)):
        radix.num_drafts = 0
        rig.add(name, np.arange(5), max_new_tokens=29, namespace=namespace)
        rig.run()
        rig.assert_right(name)
        assert radix.num_drafts == num_drafts
