from pathlib import Path
from typing import Any

import pytest

from graftlm.contracts import Model, ModelContext
from graftlm.errors import CheckpointError, ModelError, UnsupportedArchitectureError
from graftlm.testing.model import ModelConformance
from graftlm.testing.tiny_models import write_tiny_checkpoint
from graftlm_models.mamba2 import Mamba2ForCausalLM

CASES: dict[str, dict[str, Any]] = {
    "two groups": {},
    "one group": {"config": {"n_groups": 1}},
    "biases": {"config": {"use_bias": True, "use_conv_bias": False}},
    "tied": {"tie_word_embeddings": True},
    "limited steps": {"config": {"time_step_limit": [0.1, 0.9]}},
}


@pytest.mark.parametrize("sizes", CASES.values(), ids=CASES.keys())
def test_logits_equal_those_of_transformers(sizes: dict[str, Any], tmp_path: Path, assert_parity) -> None:
    assert_parity(Mamba2ForCausalLM, write_tiny_checkpoint(tmp_path, "mamba2", **sizes))


@pytest.mark.parametrize(
    ("entries", "error", "message"),
    [
        ({"n_groups": 3}, CheckpointError, "8 heads of the state space in 3 groups"),
        ({"hidden_act": "gelu"}, UnsupportedArchitectureError, "hidden_act 'gelu'"),
        ({"time_step_limit": [0.1]}, CheckpointError, "time_step_limit as two numbers"),
    ],
)
def test_a_model_that_cannot_be_served_is_refused(
    entries: dict[str, Any], error: type[ModelError], message: str, tmp_path: Path, new_context, rewrite_config
) -> None:
    write_tiny_checkpoint(tmp_path, "mamba2")
    rewrite_config(tmp_path, **entries)
    with pytest.raises(error, match=message):
        Mamba2ForCausalLM(new_context(tmp_path))


@pytest.mark.covering(strength=1)
class TestMamba2(ModelConformance):
    @pytest.fixture(autouse=True)
    def _write_checkpoint(self, tmp_path: Path) -> None:
        self.folder = write_tiny_checkpoint(tmp_path, "mamba2", vocab_size=128)

    def create(self, context: ModelContext) -> Model:
        return Mamba2ForCausalLM(context)

    def checkpoint(self) -> Path:
        return self.folder
