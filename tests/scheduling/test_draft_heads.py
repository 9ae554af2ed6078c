"""Plans for a draft head: the known token after each chunk, and slots for the keys of drafted tokens."""

import pytest

from graftlm.speculation import Speculator
from graftlm.testing.drafter import AllDrafts
from graftlm.testing.fake_draft_model import FakeDraftHeads
from graftlm_speculation.head_drafter import HeadDrafter

VOCAB = 50


class Rows(FakeDraftHeads):
    """A fake head that stores the number of slots of each request."""

    def __init__(self):
        super().__init__(VOCAB)
        self.slots, self.table, self.page_size = [], None, 1

    def run(self, batch):
        held = self.table.num_pages[batch.rows] * self.page_size
        self.slots += zip(batch.lens.tolist(), held.tolist(), strict=True)
        return super().run(batch)


def make(make_rig, max_drafts=4, **settings):
    heads = Rows()
    rig = make_rig(speculator=Speculator({"head": HeadDrafter(heads, max_drafts)}, 8, VOCAB, AllDrafts()), **settings)
    heads.table, heads.page_size = rig.scheduler.kv.table, rig.scheduler.kv.page_size
    return rig, heads


def test_a_plan_has_the_token_after_each_chunk_of_a_prompt(make_rig):
    rig, _ = make(make_rig, prefill_tokens=4)
    rig.add("a", [10, 11, 12, 13, 14, 15], max_new_tokens=3)
    rig.add("b", [20, 21, 22], max_new_tokens=3)
    rig.run()
    rig.assert_right("a")
    rig.assert_right("b")
    found = [None if plan.next_ids is None else plan.next_ids.tolist() for plan in rig.plans[:3]]
    assert found[0] == [14]
    assert found[1] == [0, 22]
    assert found[2:] == [None] * len(found[2:])


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("overlap", [False, True])
def test_requests_have_slots_for_drafted_tokens(make_rig, page_size, overlap):
    rig, heads = make(make_rig, page_size=page_size, overlap=overlap)
    rig.add("a", [10, 11, 12], max_new_tokens=20)
    rig.add("b", [20, 21], max_new_tokens=12)
    rig.run()
    rig.assert_right("a")
    rig.assert_right("b")
    assert len(heads.slots) > 5
    assert all(num_slots >= min(length + 4, 14) for length, num_slots in heads.slots)


def test_without_spare_pages_nothing_is_evicted_or_retracted_for_drafts(make_rig):
    rig, heads = make(make_rig, page_size=1, num_pages=16)
    rig.add("a", [10, 11, 12], max_new_tokens=13)
    rig.run()
    rig.assert_right("a")
    assert rig.scheduler.counters.retractions == 0
    assert heads.slots
