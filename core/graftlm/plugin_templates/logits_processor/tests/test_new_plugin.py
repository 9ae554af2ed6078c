"""Runs graftlm's conformance kit on `new-plugin`, and tests the plugin's own behaviour."""

import numpy as np
import pytest
import torch
from graftlm.testing import LogitsProcessorConformance

from graftlm_new_plugin import provide_logits_processors
from graftlm_new_plugin.options import RecentPenaltyOptions
from graftlm_new_plugin.processor import RecentPenalty


class TestContract(LogitsProcessorConformance):
    def create(self, context):
        (provider,) = provide_logits_processors()
        return provider.create(provider.options(), context)


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ([], [0, 0, 0, 0]),
        ([1, 1, 3], [0, -2, 0, -2]),  # the penalty of a repeated token applies once
        ([0, 1, 2, 3], [0, -2, -2, -2]),  # token 0 has left the window
    ],
)
def test_recent_tokens_lose_the_penalty(output, expected):
    processor = RecentPenalty(RecentPenaltyOptions(penalty=2.0, window_tokens=3))
    logits = processor.process(np.array(output, dtype=np.int32), torch.zeros(4))
    assert logits.tolist() == expected
