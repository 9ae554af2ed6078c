"""Steps that verify what a draft model drafted. It generates what the device samples, so all drafts are right."""

import pytest

from graftlm.speculation import Speculator
from graftlm.testing.drafter import AllDrafts
from graftlm.testing.fake_draft_model import FakeDraftModel
from graftlm_speculation.draft_model import DraftModelDrafter
from graftlm_speculation.options import DraftModelDrafterOptions

VOCAB = 50


def drafting(max_drafts=8, num_pages=2048, **options):
    model = FakeDraftModel(VOCAB, num_pages, page_size=4)
    drafter = DraftModelDrafter(DraftModelDrafterOptions(path="fake", max_drafts=max_drafts, **options), model)
    return drafter, Speculator({"draft_model": drafter}, max_drafts, VOCAB, AllDrafts(max_drafts))


def add_all(rig, num_requests=12):
    for i in range(num_requests):
        rig.add(f"r{i}", range(i, 2 * i + 3), max_new_tokens=1 + 7 * i % 40, stop=(i,) if i % 3 else ())


@pytest.mark.parametrize("prefill_tokens", [5, 2048])
@pytest.mark.parametrize("draft_pages", [20, 2048])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_every_draft_is_accepted(make_rig, page_size, overlap, draft_pages, prefill_tokens):
    drafter, speculator = drafting(num_pages=draft_pages, prefill_tokens=prefill_tokens)
    rig = make_rig(overlap=overlap, page_size=page_size, speculator=speculator)
    add_all(rig)
    rig.run()
    for i in range(12):
        rig.assert_right(f"r{i}")
    counts = speculator.counts["draft_model"]
    assert counts.accepted == counts.drafted > 20
    assert drafter.num_free_pages == draft_pages


def test_drafts_save_steps(make_rig):
    _, speculator = drafting(max_drafts=5)
    rig = make_rig(speculator=speculator)
    rig.add("a", [1, 2, 3], max_new_tokens=31)
    rig.run()
    rig.assert_right("a")
    assert rig.scheduler.counters.steps == 1 + 5  # the prompt, then 6 tokens a step


@pytest.mark.parametrize("overlap", [False, True])
def test_retracted_requests_are_drafted_for_again(make_rig, overlap):
    drafter, speculator = drafting()
    rig = make_rig(speculator=speculator, num_pages=40, page_size=1, overlap=overlap)
    for i in range(6):
        rig.add(f"r{i}", [i, i + 1, i + 2], max_new_tokens=30)
    rig.run()
    for i in range(6):
        rig.assert_right(f"r{i}")
    counts = speculator.counts["draft_model"]
    assert counts.accepted == counts.drafted > 40
    assert rig.scheduler.counters.retractions > 0
    assert drafter.num_free_pages == 2048


def test_an_abort_frees_the_pages_of_the_draft_model(make_rig):
    for num_steps in range(1, 7):
        drafter, speculator = drafting()
        rig = make_rig(speculator=speculator, overlap=True)
        rig.add("a", [1, 2, 3], max_new_tokens=60)
        rig.add("b", [4, 5], max_new_tokens=60)
        for _ in range(num_steps):
            rig.step()
        rig.loop.abort("a", "changed my mind")
        rig.run()
        rig.assert_right("a")
        rig.assert_right("b")
        counts = speculator.counts["draft_model"]
        assert counts.accepted == counts.drafted
        assert drafter.num_free_pages == 2048
