"""Runs graftlm's conformance kit on `new-plugin`, and tests the plugin's own behaviour."""

from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest
import torch
from graftlm.errors import WeightError
from graftlm.testing import ModelConformance

from graftlm_new_plugin import provide_models
from graftlm_new_plugin.tiny_checkpoint import CONFIG, write_tiny_checkpoint

(PROVIDER,) = provide_models()


@cache
def tiny_checkpoint() -> Path:
    """Write a small checkpoint of random weights, and return its folder."""
    return write_tiny_checkpoint(Path(mkdtemp(prefix="graftlm-new-plugin-")))


class TestContract(ModelConformance):
    def create(self, context):
        return PROVIDER.create(PROVIDER.options(), context)

    def checkpoint(self):
        return tiny_checkpoint()


def test_a_tensor_that_it_does_not_know_is_refused_by_name():
    kit = TestContract()
    weights = {**kit.weights(), "model.layers.0.self_attn.q_norm.weight": torch.ones(16)}
    with pytest.raises(WeightError, match="q_norm"):
        kit.model(weights.items())


def test_the_tiny_checkpoint_is_one_that_it_claims():
    assert CONFIG["architectures"] == list(PROVIDER.capabilities.architectures)
