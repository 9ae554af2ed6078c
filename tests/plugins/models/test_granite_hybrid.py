from pathlib import Path
from typing import Any

import pytest

from graftlm.contracts import Model, ModelContext
from graftlm.errors import CheckpointError, ModelError, UnsupportedArchitectureError
from graftlm.testing.model import ModelConformance
from graftlm.testing.tiny_models import write_tiny_checkpoint
from graftlm_models.granite_hybrid import GraniteMoeHybridForCausalLM

CASES: dict[str, dict[str, Any]] = {
    "attention last": {},
    "state space last": {"num_layers": 3},
    "without experts": {"config": {"num_local_experts": 0}},
    "rotation": {"config": {"position_embedding_type": "rope"}},
    "tied": {"tie_word_embeddings": True, "config": {"mamba_proj_bias": True, "attention_bias": True}},
}


@pytest.mark.parametrize("sizes", CASES.values(), ids=CASES.keys())
def test_logits_equal_those_of_transformers(sizes: dict[str, Any], tmp_path: Path, assert_parity) -> None:
    assert_parity(GraniteMoeHybridForCausalLM, write_tiny_checkpoint(tmp_path, "granitemoehybrid", **sizes))


def test_the_names_of_published_checkpoints_are_known(tmp_path: Path, new_context, rewrite_config) -> None:
    write_tiny_checkpoint(tmp_path, "granitemoehybrid")
    names = {"layer_types": ["mamba", "attention"], "position_embedding_type": "nope", "mamba_d_head": "auto"}
    rewrite_config(tmp_path, remove=("time_step_limit",), **names)
    model = GraniteMoeHybridForCausalLM(new_context(tmp_path))
    assert (len(model.state_layers), len(model.attention_layers), model.rotary) == (1, 1, None)


@pytest.mark.parametrize(
    ("entries", "error", "message"),
    [
        ({"layer_types": ["mamba", "conv"]}, CheckpointError, "layer_types as 2 of linear_attention, mamba"),
        ({"position_embedding_type": "alibi"}, UnsupportedArchitectureError, "position_embedding_type 'alibi'"),
    ],
)
def test_a_model_that_cannot_be_served_is_refused(
    entries: dict[str, Any], error: type[ModelError], message: str, tmp_path: Path, new_context, rewrite_config
) -> None:
    write_tiny_checkpoint(tmp_path, "granitemoehybrid")
    rewrite_config(tmp_path, **entries)
    with pytest.raises(error, match=message):
        GraniteMoeHybridForCausalLM(new_context(tmp_path))


@pytest.mark.covering(strength=1)
class TestGraniteHybrid(ModelConformance):
    @pytest.fixture(autouse=True)
    def _write_checkpoint(self, tmp_path: Path) -> None:
        self.folder = write_tiny_checkpoint(tmp_path, "granitemoehybrid", vocab_size=128)

    def create(self, context: ModelContext) -> Model:
        return GraniteMoeHybridForCausalLM(context)

    def checkpoint(self) -> Path:
        return self.folder
