from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from graftlm.checkpoint import iter_weights
from graftlm.contracts import Model, ModelContext
from graftlm.errors import CheckpointError, ModelError, UnsupportedArchitectureError
from graftlm.testing.model import ModelConformance
from graftlm.testing.paged_model import PagedModel, Tokens
from graftlm.testing.tiny_models import write_tiny_checkpoint
from graftlm_models.gpt_oss import GptOssForCausalLM
from graftlm_models.mxfp4 import dequantize_mxfp4

WINDOW = {"sliding_window": 4}  # the longest prompts of assert_parity are 8 windows
SLIDING, FULL = "sliding_attention", "full_attention"
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 8.0,
    "beta_slow": 1.0,
    "truncate": False,
}

CASES: dict[str, dict[str, Any]] = {
    "defaults": {"num_layers": 3, "config": WINDOW},
    "yarn": {"config": WINDOW, "rope_parameters": YARN},
    "plain rope, full layers": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
        "config": {"layer_types": [FULL] * 2},
    },
    "window last, tied": {"config": {**WINDOW, "layer_types": [FULL, SLIDING]}, "tie_word_embeddings": True},
    "no biases": {"config": {**WINDOW, "attention_bias": False}},
    "one expert of three": {"config": {**WINDOW, "num_local_experts": 3, "num_experts_per_tok": 1}},
    "other gate": {"config": {**WINDOW, "swiglu_limit": 7.0, "swiglu_alpha": 1.2}, "num_kv_heads": 4},
}


@pytest.mark.parametrize("sizes", CASES.values(), ids=CASES.keys())
def test_logits_equal_those_of_transformers(sizes: dict[str, Any], tmp_path: Path, assert_parity) -> None:
    assert_parity(GptOssForCausalLM, write_tiny_checkpoint(tmp_path, "gpt_oss", **sizes))


@pytest.mark.parametrize("rope", [{}, {"rope_scaling": YARN, "rope_theta": 1000.0}], ids=["absent", "older"])
def test_older_config_files_are_read(rope: dict[str, Any], tmp_path: Path, assert_parity, rewrite_config) -> None:
    write_tiny_checkpoint(tmp_path, "gpt_oss", config=WINDOW)
    own = {"initial_context_length": 4096, "experts_per_token": 2}
    rewrite_config(tmp_path, remove=("rope_parameters", "layer_types", "swiglu_alpha"), **rope, **own)
    assert_parity(GptOssForCausalLM, tmp_path)


def test_sinks_are_loaded_from_their_tensors(tmp_path: Path, new_context) -> None:
    model = GptOssForCausalLM(new_context(write_tiny_checkpoint(tmp_path, "gpt_oss")))
    weights = dict(iter_weights(tmp_path))
    model.load_weights(weights.items())
    for layer in model.attention_layers:
        sinks = layer.sinks
        assert sinks is not None
        assert torch.equal(sinks, weights[f"model.layers.{layer.layer_id}.self_attn.sinks"])


def test_experts_in_mxfp4_equal_their_decoded_numbers(tmp_path: Path, new_context, rewrite_config) -> None:
    write_tiny_checkpoint(tmp_path, "gpt_oss", hidden_size=64, intermediate_size=96)
    plain, packed = dict(iter_weights(tmp_path)), {}
    generator = torch.Generator().manual_seed(0)
    for name, tensor in list(plain.items()):
        if not name.endswith(("gate_up_proj", "down_proj")):
            continue
        num_experts, size, rows = tensor.shape
        blocks = torch.randint(256, (num_experts, rows, size // 32, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(122, 126, blocks.shape[:-1], generator=generator, dtype=torch.uint8)
        packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        plain[name] = dequantize_mxfp4(blocks, scales, name).transpose(1, 2)
    expected = _hidden(GptOssForCausalLM(new_context(tmp_path)), plain)
    quantization = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    rewrite_config(tmp_path, quantization_config=quantization)
    others = {name: tensor for name, tensor in plain.items() if f"{name}_blocks" not in packed}
    assert torch.equal(_hidden(GptOssForCausalLM(new_context(tmp_path)), others | packed), expected)


def _hidden(model: Model, weights: dict[str, torch.Tensor]) -> torch.Tensor:
    model.load_weights(weights.items())
    return PagedModel(model).step([Tokens(0, list(range(1, 20)))])[0]


@pytest.mark.parametrize(
    ("entries", "error", "message"),
    [
        ({"num_experts_per_tok": 9}, CheckpointError, "num_experts_per_tok 9, but num_local_experts is 4"),
        ({"sliding_window": "wide"}, CheckpointError, "sliding_window"),
        ({"swiglu_limit": 0}, CheckpointError, "swiglu_limit as a number above 0"),
        ({"layer_types": ["chunked_attention"] * 2}, CheckpointError, "layer_types"),
        ({"quantization_config": {"quant_method": "hqq"}}, UnsupportedArchitectureError, "hqq"),
    ],
)
def test_a_model_that_cannot_be_served_exactly_is_refused(
    entries: dict[str, Any], error: type[ModelError], message: str, tmp_path: Path, new_context, rewrite_config
) -> None:
    write_tiny_checkpoint(tmp_path, "gpt_oss")
    rewrite_config(tmp_path, **entries)
    with pytest.raises(error, match=message):
        GptOssForCausalLM(new_context(tmp_path))


class TestGptOssConformance(ModelConformance):
    parameters: ClassVar = {"page_size": (4,), "chunk_len": (3,)}

    @pytest.fixture(autouse=True)
    def _write(self, tmp_path_factory):
        self.folder = tmp_path_factory.getbasetemp() / "gpt-oss-conformance"
        if not self.folder.exists():
            write_tiny_checkpoint(self.folder, "gpt_oss", config=WINDOW)

    def create(self, context: ModelContext) -> Model:
        return GptOssForCausalLM(context)

    def checkpoint(self) -> Path:
        return self.folder
