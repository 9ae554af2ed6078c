"""Runs graftlm's conformance kit on `new-plugin`, and tests the plugin's own behaviour."""

import numpy as np
import pytest
from graftlm.contracts import DraftRequest
from graftlm.testing import DrafterConformance

from graftlm_new_plugin import provide_drafters
from graftlm_new_plugin.drafter import Followers, FollowersOptions


class TestContract(DrafterConformance):
    def create(self, context):
        (provider,) = provide_drafters()
        return provider.create(provider.options(), context)


def drafted(drafter, token_ids, row=0, limit=4):
    request = DraftRequest(row, "", np.array(token_ids, dtype=np.int32), limit)
    (draft,) = drafter.propose([request])
    return None if draft is None else draft.token_ids.tolist()


@pytest.mark.parametrize(
    ("token_ids", "context_tokens", "expected"),
    [
        ([1, 2, 3, 4, 1, 2], 2, [3, 4, 1, 2]),
        ([1, 2, 3, 1, 2, 4, 1, 2], 2, [4, 1, 2, 4]),  # the latest follower is drafted
        ([1, 2, 3, 4, 5, 2], 2, None),
        ([1, 2, 3, 4, 5, 2], 1, [3, 4, 5, 2]),
        ([1], 2, None),
    ],
)
def test_the_tokens_that_followed_are_drafted(token_ids, context_tokens, expected):
    assert drafted(Followers(FollowersOptions(context_tokens=context_tokens)), token_ids) == expected


def test_a_request_that_grows_is_read_once():
    drafter = Followers(FollowersOptions())
    text = [1, 2, 3, 4, 1, 2, 5, 3, 4, 1, 2]
    for length in range(1, len(text) + 1):
        assert drafted(drafter, text[:length]) == drafted(Followers(FollowersOptions()), text[:length])
