import random

import numpy as np
import pytest

from graftlm.contracts import Drafter, DrafterContext, DraftRequest
from graftlm.testing.drafter import DrafterConformance
from graftlm.testing.fake_device import expected_output
from graftlm.testing.fake_draft_model import FakeDraftModel
from graftlm_speculation.draft_model import DraftModelDrafter
from graftlm_speculation.options import DraftModelDrafterOptions

VOCAB = 40


class TestDraftModelDrafter(DrafterConformance):
    def create(self, context: DrafterContext) -> Drafter:
        return DraftModelDrafter(DraftModelDrafterOptions(path="fake"), context.load_model("fake", 4096))


class TestDraftModelDrafterInASmallMemory(DrafterConformance):
    def create(self, context: DrafterContext) -> Drafter:
        options = DraftModelDrafterOptions(path="fake", prefill_tokens=30)
        return DraftModelDrafter(options, context.load_model("fake", 100))


class Bench:
    """A drafter with a fake draft model, and texts that are what this model would generate."""

    def __init__(self, num_pages=4096, page_size=4, context_len=1024, max_rows=64, vocab_size=VOCAB, **options):
        self.model = FakeDraftModel(vocab_size, num_pages, page_size, context_len=context_len, max_rows=max_rows)
        self.options = DraftModelDrafterOptions(path="fake", **options)
        self.drafter = DraftModelDrafter(self.options, self.model)

    def propose(self, texts, limit=8):
        """Return the drafted tokens of each row of a dict; None without a draft."""
        requests = [DraftRequest(row, "", np.array(text, dtype=np.int32), limit) for row, text in texts.items()]
        drafts = self.drafter.propose(requests)
        found = {row: None if d is None else d.token_ids.tolist() for row, d in zip(texts, drafts, strict=True)}
        for row, token_ids in found.items():
            if token_ids is not None:
                assert token_ids == expected_output(list(texts[row]), len(token_ids), VOCAB), f"row {row}"
        return found

    def draft(self, text, limit=8, row=0):
        return self.propose({row: text}, limit)[row]

    @property
    def num_computed(self):
        """Known tokens that the latest batch computed."""
        return len(self.model.batches[-1].token_ids)

    @property
    def num_batches(self):
        return len(self.model.batches)


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_a_draft_is_what_the_model_generates(page_size):
    bench = Bench(page_size=page_size, max_drafts=5)
    assert len(bench.draft([1, 2, 3])) == 5
    assert len(bench.draft([1, 2, 3, 39, 38], limit=2)) == 2


def test_accepted_tokens_are_not_computed_again():
    bench = Bench(max_drafts=5)
    text = list(range(20))
    drafted = bench.draft(text)
    assert bench.num_computed == 20
    bench.draft([*text, *drafted, 7])
    assert bench.num_computed == 2  # the last drafted token was not computed, and 7 was sampled after it


def test_rejected_tokens_are_computed_again():
    bench = Bench(max_drafts=5)
    text = list(range(20))
    drafted = bench.draft(text)
    wrong = (drafted[2] + 1) % VOCAB
    bench.draft([*text, *drafted[:2], wrong])
    assert bench.num_computed == 1
    bench.draft([1, 2])  # a request whose tokens were replaced
    assert bench.num_computed == 2


def test_the_rest_of_a_draft_that_comes_true_is_returned_without_computing():
    bench = Bench(max_drafts=5)
    text = [1, 2, 3]
    drafted = bench.draft(text)
    assert bench.draft(text) == drafted
    assert bench.draft([*text, drafted[0]]) == drafted[1:]
    assert bench.num_batches == 1
    assert len(bench.draft([*text, *drafted[:2]])) == 5  # only three were left
    assert bench.num_computed == 1
    assert bench.num_batches == 2


def test_rows_that_are_asked_together_are_one_batch():
    bench = Bench()
    bench.propose({row: range(row, 2 * row + 1) for row in range(9)})
    assert bench.num_batches == 1
    assert sorted(bench.model.batches[0].query_lens.tolist()) == list(range(1, 10))


def test_a_batch_has_at_most_the_rows_that_the_model_takes():
    bench = Bench(max_rows=4)
    found = bench.propose({row: [row, 1] for row in range(9)})
    assert None not in found.values()
    assert [len(batch.query_lens) for batch in bench.model.batches] == [4, 4, 1]


def test_a_long_prompt_is_computed_in_chunks_and_does_not_delay_others():
    bench = Bench(prefill_tokens=8)
    long, short = list(range(30)), [5, 6]
    seen = [bench.propose({0: long, 1: [*short, *[9] * i]}) for i in range(5)]
    assert [found[1] is not None for found in seen] == [True] * 5
    assert [found[0] is not None for found in seen] == [False] * 4 + [True]
    assert all(len(batch.token_ids) <= 8 for batch in bench.model.batches)


def test_a_closed_row_frees_its_pages():
    bench = Bench(num_pages=10)
    bench.draft(range(20))
    assert bench.drafter.num_free_pages < 10
    bench.drafter.close(0)
    assert bench.drafter.num_free_pages == 10
    bench.drafter.close(0)
    assert bench.drafter.num_free_pages == 10


def test_memory_is_bounded_when_more_rows_are_asked_than_fit():
    bench = Bench(num_pages=12, page_size=4)
    texts = {row: [row, *range(14)] for row in range(8)}  # five pages each, with the draft
    found = bench.propose(texts)
    assert sum(tokens is not None for tokens in found.values()) == 2
    again = bench.propose({row: [*text, 3] for row, text in texts.items()})
    assert [row for row, tokens in again.items() if tokens is not None] == [0, 1]  # those that have pages keep them
    assert bench.num_computed == 2


def test_the_rows_that_were_used_least_recently_are_evicted():
    bench = Bench(num_pages=10, page_size=4)
    for row in (0, 1, 2):
        assert bench.draft([row, *range(14)], row=row)
    assert bench.draft([1, *range(14), 5], row=1)
    assert bench.num_computed == 1
    assert bench.draft([0, *range(14), 5], row=0)
    assert bench.num_computed == 16


def test_rows_that_grow_together_do_not_stop_each_other():
    bench = Bench(num_pages=10, page_size=1, max_drafts=2)
    texts = {row: [row] for row in range(4)}
    for _ in range(8):
        found = bench.propose(texts)
        assert any(tokens is not None for tokens in found.values())
        texts = {row: [*text, 1] for row, text in texts.items()}


@pytest.mark.parametrize(
    ("num_tokens", "num_drafted"), [(3, 5), (16, 5), (17, 4), (18, 3), (19, 2), (20, None), (25, None)]
)
def test_a_draft_stays_within_the_context(num_tokens, num_drafted):
    bench = Bench(context_len=20, max_drafts=5)
    drafted = bench.draft(range(num_tokens))
    assert (None if drafted is None else len(drafted)) == num_drafted


def test_a_request_that_exceeds_the_memory_has_no_draft():
    bench = Bench(num_pages=4, page_size=4)
    found = bench.propose({0: range(30), 1: [1, 2]})
    assert found[0] is None
    assert found[1] is not None


@pytest.mark.parametrize("last", [5, 39])  # a token that the draft model has, and one that it lacks
def test_a_request_that_cannot_be_drafted_for_again_frees_its_pages(last):
    bench = Bench(num_pages=4, page_size=4, vocab_size=VOCAB if last == 5 else 39)
    text = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13]
    first = [DraftRequest(0, "", np.array(text, dtype=np.int32), 8)]
    assert bench.drafter.propose(first) != [None]
    assert bench.drafter.num_free_pages == 0
    longer = [*text, 4, 5, last] if last == 5 else [*text, last]
    requests = [DraftRequest(row, "", np.array(t, dtype=np.int32), 8) for row, t in ((0, longer), (1, [1, 2, 3]))]
    for _ in range(2):
        assert [draft is None for draft in bench.drafter.propose(requests)] == [True, False]
    assert bench.num_batches == 2
    bench.drafter.close(1)
    assert bench.drafter.num_free_pages == 4


@pytest.mark.parametrize(("num_tokens", "num_drafted"), [(11, 5), (13, 4), (15, 2), (16, None)])
def test_a_draft_stays_within_the_memory(num_tokens, num_drafted):
    drafted = Bench(num_pages=4, page_size=4, max_drafts=5).draft(range(num_tokens))
    assert (None if drafted is None else len(drafted)) == num_drafted


def test_tokens_that_the_draft_model_lacks_are_not_passed_to_it():
    bench = Bench(vocab_size=30)
    assert bench.draft([1, 2, 35]) is None
    assert bench.num_batches == 0


def test_the_confidence_is_the_mean_probability():
    drafter = DraftModelDrafter(DraftModelDrafterOptions(path="fake"), FakeDraftModel(VOCAB, probability=0.25))
    (draft,) = drafter.propose([DraftRequest(0, "", np.array([1, 2], dtype=np.int32), 4)])
    assert draft.confidence == 0.25


def test_a_failed_batch_leaves_nothing_behind():
    def fail(token_ids):
        raise RuntimeError("the device failed")

    model = FakeDraftModel(VOCAB, 8, next_token=fail)
    drafter = DraftModelDrafter(DraftModelDrafterOptions(path="fake"), model)
    with pytest.raises(RuntimeError, match="the device failed"):
        drafter.propose([DraftRequest(0, "", np.array([1, 2], dtype=np.int32), 4)])
    assert drafter.num_free_pages == 8


@pytest.mark.parametrize("seed", range(4))
def test_drafts_are_right_whatever_is_accepted_evicted_and_closed(seed):
    draw = random.Random(seed)
    bench = Bench(num_pages=30, page_size=draw.choice([1, 2, 4]), max_rows=3, prefill_tokens=12, max_drafts=4)
    texts = {row: [draw.randrange(VOCAB) for _ in range(draw.randrange(1, 12))] for row in range(7)}
    num_drafts = 0
    for _ in range(60):
        asked = draw.sample(sorted(texts), draw.randrange(1, 7))
        for row, tokens in bench.propose({row: texts[row] for row in asked}, limit=draw.randrange(1, 9)).items():
            num_drafts += tokens is not None
            accepted = (tokens or [])[: draw.randrange(5)]
            texts[row] = [*texts[row], *accepted, draw.randrange(VOCAB)]
            if len(texts[row]) > 60 or draw.random() < 0.05:
                bench.drafter.close(row)
                texts[row] = [draw.randrange(VOCAB) for _ in range(draw.randrange(1, 12))]
        assert bench.drafter.num_free_pages >= 0
    assert num_drafts > 40
