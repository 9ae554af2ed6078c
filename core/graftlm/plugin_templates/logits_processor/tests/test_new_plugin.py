"""`new-plugin` under graftlm's conformance kit, and what is particular to it."""

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
        ([1, 1, 3], [0, -2, 0, -2]),  # once for a token, however often it came
        ([0, 1, 2, 3], [0, -2, -2, -2]),  # the first one has left the window
    ],
)
def test_recent_tokens_lose_the_penalty(output, expected):
    processor = RecentPenalty(RecentPenaltyOptions(penalty=2.0, window_tokens=3))
    logits = processor.process(np.array(output, dtype=np.int32), torch.zeros(4))
    assert logits.tolist() == expected
