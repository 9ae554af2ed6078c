"""`new-plugin` under graftlm's conformance kit, and what is particular to it."""

from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest
from graftlm.errors import WeightError
from graftlm.testing import ModelConformance
from graftlm.testing.tiny_models import write_tiny_checkpoint

from graftlm_new_plugin import provide_models

(PROVIDER,) = provide_models()


@cache
def tiny_checkpoint() -> Path:
    """A small checkpoint of random weights; replace it by one of your architecture."""
    folder = Path(mkdtemp(prefix="graftlm-new-plugin-"))
    write_tiny_checkpoint(folder, "llama", num_layers=2, hidden_size=48, vocab_size=300)
    return folder


class TestContract(ModelConformance):
    def create(self, context):
        return PROVIDER.create(PROVIDER.options(), context)

    def checkpoint(self):
        return tiny_checkpoint()


def test_a_tensor_that_it_does_not_know_is_refused_by_name():
    kit = TestContract()
    weights = {**kit.weights(), "model.layers.0.self_attn.q_norm.weight": next(iter(kit.weights().values()))}
    with pytest.raises(WeightError, match="q_norm"):
        kit.model(weights.items())
