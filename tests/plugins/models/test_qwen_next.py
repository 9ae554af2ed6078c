from pathlib import Path
from typing import Any

import pytest
import torch

from graftlm.checkpoint import iter_weights
from graftlm.contracts import Model, ModelContext
from graftlm.errors import CheckpointError, ModelError, UnsupportedArchitectureError
from graftlm.testing.model import ModelConformance
from graftlm.testing.tiny_models import write_tiny_checkpoint
from graftlm_models.qwen_next import QwenNextForCausalLM

CASES: dict[str, dict[str, Any]] = {
    "attention last": {},
    "delta network last": {"num_layers": 3},
    "one value head per key head": {"config": {"linear_num_value_heads": 2, "attention_bias": True}},
    "wide kernel, tied": {"tie_word_embeddings": True, "config": {"linear_conv_kernel_dim": 5}},
}


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_text"])
@pytest.mark.parametrize("sizes", CASES.values(), ids=CASES.keys())
def test_logits_equal_those_of_transformers(family, sizes: dict[str, Any], tmp_path: Path, assert_parity) -> None:
    assert_parity(QwenNextForCausalLM, write_tiny_checkpoint(tmp_path, family, **sizes))


def test_some_layers_may_have_no_experts(tmp_path: Path, assert_parity) -> None:
    config = {"mlp_only_layers": [0], "norm_topk_prob": False}
    assert_parity(QwenNextForCausalLM, write_tiny_checkpoint(tmp_path, "qwen3_next", config=config))


def test_weights_that_predict_several_tokens_are_ignored(tmp_path: Path, new_context) -> None:
    write_tiny_checkpoint(tmp_path, "qwen3_5_text")
    weights = [*iter_weights(tmp_path), ("mtp.fc.weight", torch.zeros(64, 128))]
    QwenNextForCausalLM(new_context(tmp_path)).load_weights(weights)


@pytest.mark.parametrize(
    ("entries", "error", "message"),
    [
        ({"layer_types": ["full_attention", "conv"]}, CheckpointError, "layer_types as 2 of full_attention or linear"),
        ({"linear_num_value_heads": 3}, CheckpointError, "linear_num_value_heads 3 and linear_num_key_heads 2"),
        ({"hidden_act": "gelu"}, UnsupportedArchitectureError, "hidden_act 'gelu'"),
    ],
)
def test_a_model_that_cannot_be_served_is_refused(
    entries: dict[str, Any], error: type[ModelError], message: str, tmp_path: Path, new_context, rewrite_config
) -> None:
    write_tiny_checkpoint(tmp_path, "qwen3_5_text")
    rewrite_config(tmp_path, **entries)
    with pytest.raises(error, match=message):
        QwenNextForCausalLM(new_context(tmp_path))


@pytest.mark.covering(strength=1)
class TestQwenNext(ModelConformance):
    @pytest.fixture(autouse=True)
    def _write_checkpoint(self, tmp_path: Path) -> None:
        self.folder = write_tiny_checkpoint(tmp_path, "qwen3_next", vocab_size=128)

    def create(self, context: ModelContext) -> Model:
        return QwenNextForCausalLM(context)

    def checkpoint(self) -> Path:
        return self.folder
