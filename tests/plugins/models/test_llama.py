from pathlib import Path
from typing import Any

import pytest
import torch

from graftlm.checkpoint import iter_weights
from graftlm.contracts import Model, ModelContext
from graftlm.errors import CheckpointError, InvariantError, ModelError, UnsupportedArchitectureError
from graftlm.testing.batches import make_batch
from graftlm.testing.model import ModelConformance
from graftlm.testing.tiny_models import write_tiny_checkpoint
from graftlm_models.llama import LlamaForCausalLM

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}

CASES: dict[str, dict[str, Any]] = {
    "as many kv heads": {"num_heads": 8, "num_kv_heads": 8},
    "groups of 2": {"num_heads": 8, "num_kv_heads": 4},
    "groups of 4": {"num_heads": 8, "num_kv_heads": 2},
    "one kv head for 8": {"num_heads": 8, "num_kv_heads": 1},
    "heads wider than hidden": {"head_dim": 64},
    "heads narrower than hidden": {"head_dim": 8},
    "tied": {"tie_word_embeddings": True},
    "one layer": {"num_layers": 1},
    "odd vocabulary": {"vocab_size": 131},
    "linear rope": {"rope_parameters": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 2.5}},
    "llama3 rope": {"rope_parameters": LLAMA3},
    "yarn rope": {"rope_parameters": YARN},
    "dynamic rope": {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 4.0}},
    "3.2, tied with llama3 rope": {"tie_word_embeddings": True, "rope_parameters": LLAMA3, "head_dim": 32},
    "large theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 500000}},
    "biases": {"config": {"attention_bias": True, "mlp_bias": True}},
    "attention bias": {"config": {"attention_bias": True}},
    "gelu": {"config": {"hidden_act": "gelu"}},
    "tanh gelu": {"config": {"hidden_act": "gelu_pytorch_tanh"}},
    "relu": {"config": {"hidden_act": "relu"}},
    "large eps": {"config": {"rms_norm_eps": 0.1}},
    "three files": {"shards": 3},
}


@pytest.mark.parametrize("sizes", CASES.values(), ids=CASES.keys())
def test_logits_equal_those_of_transformers(sizes: dict[str, Any], tmp_path: Path, assert_parity) -> None:
    assert_parity(LlamaForCausalLM, write_tiny_checkpoint(tmp_path, "llama", **sizes))


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 500.0},
        {"rope_theta": 500.0, "rope_scaling": None},
        {"rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 4.0}},
        {"rope_theta": 500.0, "rope_scaling": LLAMA3 | {"rope_theta": 500.0}},
        {},
    ],
    ids=["theta", "no scaling", "linear by type", "llama3", "neither"],
)
def test_rope_entries_of_older_config_files_are_read(
    rope: dict[str, Any], tmp_path: Path, assert_parity, rewrite_config
) -> None:
    write_tiny_checkpoint(tmp_path, "llama")
    rewrite_config(tmp_path, remove=("rope_parameters",), **rope)
    assert_parity(LlamaForCausalLM, tmp_path)


def test_missing_optional_sizes_are_derived(tmp_path: Path, assert_parity, rewrite_config) -> None:
    write_tiny_checkpoint(tmp_path, "llama", num_kv_heads=4)
    rewrite_config(tmp_path, remove=("num_key_value_heads", "head_dim", "tie_word_embeddings", "attention_bias"))
    assert_parity(LlamaForCausalLM, tmp_path)


@pytest.mark.parametrize(
    ("entries", "error", "message"),
    [
        ({"rope_parameters": {"rope_type": "spiral", "factor": 2.0}}, UnsupportedArchitectureError, "spiral"),
        ({"rope_parameters": {"rope_type": "longrope"}}, CheckpointError, "short_factor"),
        ({"rope_parameters": {"rope_type": "linear"}}, CheckpointError, "factor"),
        ({"rope_parameters": {"rope_theta": "big"}}, CheckpointError, "rope_theta"),
        ({"rope_parameters": [1]}, CheckpointError, "rope parameters"),
        ({"rope_parameters": {"full_attention": {}}}, UnsupportedArchitectureError, "per layer type"),
        ({"partial_rotary_factor": 0.5}, UnsupportedArchitectureError, "partial_rotary_factor"),
        ({"hidden_act": "laplace"}, UnsupportedArchitectureError, "laplace"),
        ({"quantization_config": {"quant_method": "hqq"}}, UnsupportedArchitectureError, "hqq"),
        ({"hidden_size": None}, CheckpointError, "hidden_size"),
        ({"num_hidden_layers": 1.5}, CheckpointError, "num_hidden_layers"),
        ({"num_key_value_heads": 3}, CheckpointError, "multiple"),
        ({"head_dim": 15}, CheckpointError, "even"),
        ({"rms_norm_eps": "small"}, CheckpointError, "rms_norm_eps"),
        ({"attention_bias": "yes"}, CheckpointError, "attention_bias"),
    ],
)
def test_a_model_that_cannot_be_served_exactly_is_refused(
    entries: dict[str, Any], error: type[ModelError], message: str, tmp_path: Path, new_context, rewrite_config
) -> None:
    write_tiny_checkpoint(tmp_path, "llama")
    rewrite_config(tmp_path, **entries)
    with pytest.raises(error, match=message):
        LlamaForCausalLM(new_context(tmp_path))


def test_the_windows_of_another_family_are_refused(tmp_path: Path, new_context, rewrite_config) -> None:
    write_tiny_checkpoint(tmp_path, "mistral")
    with pytest.raises(UnsupportedArchitectureError, match=r"MistralForCausalLM has sliding_window 16.*to auto"):
        LlamaForCausalLM(new_context(tmp_path))
    rewrite_config(tmp_path, sliding_window=None)
    assert {layer.sliding_window for layer in LlamaForCausalLM(new_context(tmp_path)).attention_layers} == {None}


@pytest.mark.parametrize("name", ["lm_head.weight", "model.embed_tokens.weight"])
def test_tied_weights_may_have_either_name(name: str, tmp_path: Path, new_context) -> None:
    write_tiny_checkpoint(tmp_path, "llama", tie_word_embeddings=True)
    weights = dict(iter_weights(tmp_path))
    embedding = weights.pop("model.embed_tokens.weight")
    model = LlamaForCausalLM(new_context(tmp_path))
    model.load_weights({**weights, name: embedding}.items())
    assert torch.equal(model.logits(torch.eye(64)).T, embedding)


def test_forward_without_a_backend_is_an_error(tmp_path: Path, new_context) -> None:
    write_tiny_checkpoint(tmp_path, "llama")
    model = LlamaForCausalLM(new_context(tmp_path))
    model.load_weights(iter_weights(tmp_path))
    with pytest.raises(InvariantError, match="bind_attention"):
        model.forward(make_batch([([1, 2], 0)], [[0]], page_size=4))


class TestLlamaConformance(ModelConformance):
    @pytest.fixture(autouse=True)
    def _write_checkpoint(self, tmp_path: Path) -> None:
        config = {"attention_bias": True, "mlp_bias": True}
        self.folder = write_tiny_checkpoint(tmp_path, "llama", vocab_size=128, config=config)

    def create(self, context: ModelContext) -> Model:
        return LlamaForCausalLM(context)

    def checkpoint(self) -> Path:
        return self.folder
