from pathlib import Path
from typing import Any

import pytest

from graftlm.contracts import Model, ModelContext
from graftlm.errors import CheckpointError
from graftlm.testing.model import ModelConformance
from graftlm.testing.tiny_models import write_tiny_checkpoint
from graftlm_models.lfm2 import Lfm2ForCausalLM

CASES: dict[str, dict[str, Any]] = {
    "attention last": {},
    "convolution last": {"config": {"layer_types": ["full_attention", "conv"]}},
    "four layers": {"num_layers": 4, "config": {"layer_types": ["conv", "conv", "full_attention", "conv"]}},
    "a wider kernel without bias": {"config": {"conv_L_cache": 4, "conv_bias": False}},
    "adjusted feed-forward size": {"config": {"block_auto_adjust_ff_dim": True, "block_multiple_of": 40}},
    "tied": {"tie_word_embeddings": True},
}


@pytest.mark.parametrize("sizes", CASES.values(), ids=CASES.keys())
def test_logits_equal_those_of_transformers(sizes: dict[str, Any], tmp_path: Path, assert_parity) -> None:
    assert_parity(Lfm2ForCausalLM, write_tiny_checkpoint(tmp_path, "lfm2", **sizes))


def test_the_names_of_the_first_checkpoints_are_known(tmp_path: Path, assert_parity, rewrite_config) -> None:
    write_tiny_checkpoint(tmp_path, "lfm2", tie_word_embeddings=True)
    names = {"full_attn_idxs": [1], "tie_embedding": True, "block_ff_dim": 96}
    rewrite_config(tmp_path, remove=("layer_types", "tie_word_embeddings", "intermediate_size"), **names)
    assert_parity(Lfm2ForCausalLM, tmp_path)


def test_layer_types_are_checked(tmp_path: Path, new_context, rewrite_config) -> None:
    write_tiny_checkpoint(tmp_path, "lfm2")
    rewrite_config(tmp_path, layer_types=["conv", "linear_attention"])
    with pytest.raises(CheckpointError, match="layer_types as 2 of full_attention or conv"):
        Lfm2ForCausalLM(new_context(tmp_path))


@pytest.mark.covering(strength=1)
class TestLfm2(ModelConformance):
    def create(self, context: ModelContext) -> Model:
        return Lfm2ForCausalLM(context)

    @pytest.fixture(autouse=True)
    def _write_checkpoint(self, tmp_path: Path) -> None:
        self.folder = write_tiny_checkpoint(tmp_path, "lfm2", vocab_size=128)

    def checkpoint(self) -> Path:
        return self.folder
