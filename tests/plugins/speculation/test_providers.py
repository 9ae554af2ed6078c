import numpy as np
import pytest
from pydantic import ValidationError

import graftlm_speculation
from graftlm.contracts import API_VERSION, DrafterContext, Platform
from graftlm.errors import ConfigError
from graftlm.testing.fake_draft_model import FakeDraftModel
from graftlm_speculation.options import DraftModelDrafterOptions, SuffixOptions

PROVIDERS = {provider.name: provider for provider in graftlm_speculation.provide_drafters()}


@pytest.mark.parametrize(
    ("name", "options", "class_name"),
    [
        ("radix", {}, "RadixDrafter"),
        ("suffix", {}, "SuffixDrafter"),
        ("draft_model", {"path": "small"}, "DraftModelDrafter"),
    ],
)
def test_a_provider_creates_its_drafter(name, options, class_name):
    provider = PROVIDERS[name]
    context = DrafterContext(
        lambda key, num_tokens: np.empty(0, dtype=np.int32),
        vocab_size=10,
        load_model=lambda path, kv_tokens: FakeDraftModel(10),
    )
    assert type(provider.create(provider.options(**options), context)).__name__ == class_name
    assert provider.api_version == API_VERSION
    assert provider.unavailable(Platform()) is None


def test_the_draft_model_is_the_one_that_the_options_name():
    loaded = []

    def load_model(path, kv_tokens):
        loaded.append((path, kv_tokens))
        return FakeDraftModel(10)

    provider = PROVIDERS["draft_model"]
    context = DrafterContext(lambda key, num_tokens: np.empty(0, dtype=np.int32), 10, load_model)
    provider.create(provider.options(path="small", kv_tokens=64), context)
    assert loaded == [("small", 64)]


def test_a_context_without_models_refuses_a_draft_model():
    provider = PROVIDERS["draft_model"]
    context = DrafterContext(lambda key, num_tokens: np.empty(0, dtype=np.int32), 10)
    with pytest.raises(ConfigError, match="draft model 'small': draft models cannot be loaded here"):
        provider.create(provider.options(path="small"), context)


def test_a_draft_model_has_a_checkpoint():
    with pytest.raises(ValidationError, match="Field required"):
        DraftModelDrafterOptions()


def test_the_prefix_cache_is_asked_before_the_requests_own_text_and_a_model_last():
    by_rank = sorted(PROVIDERS, key=lambda name: -PROVIDERS[name].rank)
    assert by_rank == ["radix", "suffix", "draft_model", "eagle3", "mtp"]


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
