import numpy as np
import pytest

from graftlm.contracts import Drafter, DrafterContext, DraftRequest
from graftlm.testing.drafter import DrafterConformance
from graftlm.testing.fake_draft_model import FakeDraftHeads
from graftlm_speculation.head_drafter import HeadDrafter


class TestHeadDrafter(DrafterConformance):
    def create(self, context: DrafterContext) -> Drafter:
        return HeadDrafter(context.load_head(lambda head: None, "fake"), 5)


def requests_of(texts, limit=8):
    return [DraftRequest(row, "", np.array(text, dtype=np.int32), limit) for row, text in enumerate(texts)]


def drafted(drafter, texts, limit=8):
    return [None if d is None else d.token_ids.tolist() for d in drafter.propose(requests_of(texts, limit))]


def test_all_requests_are_one_batch():
    heads = FakeDraftHeads(40)
    assert drafted(HeadDrafter(heads, 3), [[1, 2], [5, 6, 7], [9, 39]]) == [[3, 4, 5], [8, 9, 10], [0, 1, 2]]
    (batch,) = heads.batches
    assert batch.lens.tolist() == [2, 3, 2]
    assert batch.limits.tolist() == [3, 3, 3]


@pytest.mark.parametrize(("limit", "room", "expected"), [(8, 64, [3, 4, 5, 6]), (2, 64, [3, 4]), (8, 1, [3])])
def test_a_draft_is_limited_by_options_request_and_pages(limit, room, expected):
    assert drafted(HeadDrafter(FakeDraftHeads(40, room), 4), [[1, 2]], limit) == [expected]


def test_a_request_without_a_known_hidden_state_has_no_draft():
    heads = FakeDraftHeads(40)
    heads.unknown = {1}
    assert drafted(HeadDrafter(heads, 2), [[1, 2], [1, 2], [7]]) == [[3, 4], None, None]
    assert drafted(HeadDrafter(heads, 2), [[7]]) == [None]


def test_the_confidence_is_the_mean_probability_of_the_drafted_tokens():
    (draft,) = HeadDrafter(FakeDraftHeads(40, room=2, probability=0.5), 4).propose(requests_of([[1, 2]]))
    assert draft.confidence == 0.5
