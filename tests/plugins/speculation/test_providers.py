import numpy as np
import pytest
from pydantic import ValidationError

import graftlm_speculation
from graftlm.contracts import API_VERSION, DrafterContext, Platform
from graftlm_speculation.options import SuffixOptions

PROVIDERS = {provider.name: provider for provider in graftlm_speculation.provide_drafters()}


@pytest.mark.parametrize(("name", "class_name"), [("radix", "RadixDrafter"), ("suffix", "SuffixDrafter")])
def test_a_provider_creates_its_drafter(name, class_name):
    provider = PROVIDERS[name]
    context = DrafterContext(lambda key, num_tokens: np.empty(0, dtype=np.int32), vocab_size=10)
    assert type(provider.create(provider.options(), context)).__name__ == class_name
    assert provider.api_version == API_VERSION
    assert provider.unavailable(Platform()) is None


def test_the_prefix_cache_is_asked_before_the_requests_own_text():
    assert sorted(PROVIDERS, key=lambda name: -PROVIDERS[name].rank) == ["radix", "suffix"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_match_tokens": 0}, "greater than or equal to 1"),
        ({"max_match_tokens": 0}, "greater than or equal to 1"),
        ({"min_match_tokens": 5, "max_match_tokens": 4}, "min_match_tokens is 5, above max_match_tokens, 4"),
        ({"match_tokens": 4}, "Extra inputs"),
    ],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(ValidationError, match=message):
        SuffixOptions(**options)
