from pathlib import Path
from typing import Any, ClassVar

import pytest

from graftlm.contracts import Model, ModelContext
from graftlm.errors import CheckpointError, UnsupportedArchitectureError
from graftlm.testing.model import ModelConformance
from graftlm.testing.tiny_models import Family, write_tiny_checkpoint
from graftlm_models.qwen import QwenForCausalLM

WINDOW = {"use_sliding_window": True, "sliding_window": 5}

CASES: dict[str, tuple[Family, dict[str, Any]]] = {
    "qwen2": ("qwen2", {}),
    "qwen2 tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2 wide heads": ("qwen2", {"head_dim": 64, "num_kv_heads": 1}),
    "qwen2 window in the last layer": ("qwen2", {"config": {**WINDOW, "max_window_layers": 1}}),
    "qwen2 window in all layers": ("qwen2", {"config": {**WINDOW, "max_window_layers": 0}}),
    "qwen2 window by layer types": (
        "qwen2",
        {"config": {**WINDOW, "layer_types": ["sliding_attention", "full_attention"]}},
    ),
    "qwen2 window not used": ("qwen2", {"config": {"sliding_window": 5, "max_window_layers": 0}}),
    "qwen2 yarn": ("qwen2", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0}}),
    "qwen2 two files": ("qwen2", {"shards": 2}),
    "qwen2 untied with narrow heads": ("qwen2", {"head_dim": 8, "num_heads": 4, "num_kv_heads": 4}),
    "qwen2 moe": ("qwen2_moe", {}),
    "qwen2 moe without biases": ("qwen2_moe", {"config": {"qkv_bias": False}}),
    "qwen2 moe with normalised weights": ("qwen2_moe", {"config": {"norm_topk_prob": True}}),
    "qwen2 moe in every other layer": ("qwen2_moe", {"num_layers": 3, "config": {"decoder_sparse_step": 2}}),
    "qwen2 moe window": ("qwen2_moe", {"num_layers": 4, "config": {**WINDOW, "max_window_layers": 3}}),
    "qwen3 moe": ("qwen3_moe", {}),
    "qwen3 moe tied, wide heads": ("qwen3_moe", {"tie_word_embeddings": True, "head_dim": 64}),
    "qwen3 moe with plain weights": ("qwen3_moe", {"config": {"norm_topk_prob": False}}),
    "qwen3 moe but one layer": ("qwen3_moe", {"config": {"mlp_only_layers": [0]}}),
    "qwen3 moe window": ("qwen3_moe", {"config": WINDOW}),
    "qwen3 moe 64 experts": ("qwen3_moe", {"config": {"num_experts": 64, "num_experts_per_tok": 8}}),
    "qwen3": ("qwen3", {}),
    "qwen3 tied": ("qwen3", {"tie_word_embeddings": True}),
    "qwen3 wide heads": ("qwen3", {"head_dim": 64, "num_heads": 8, "num_kv_heads": 2}),
    "qwen3 biases": ("qwen3", {"config": {"attention_bias": True}}),
    "qwen3 window": ("qwen3", {"config": {**WINDOW, "max_window_layers": 1}}),
}


@pytest.mark.parametrize(("family", "sizes"), CASES.values(), ids=CASES.keys())
def test_logits_equal_those_of_transformers(
    family: Family, sizes: dict[str, Any], tmp_path: Path, assert_parity
) -> None:
    assert_parity(QwenForCausalLM, write_tiny_checkpoint(tmp_path, family, **sizes))


def test_windows_in_files_without_layer_types_are_read(
    tmp_path: Path, assert_parity, new_context, rewrite_config
) -> None:
    write_tiny_checkpoint(tmp_path, "qwen2", config={**WINDOW, "max_window_layers": 1})
    rewrite_config(tmp_path, remove=("layer_types",))
    windows = [layer.sliding_window for layer in QwenForCausalLM(new_context(tmp_path)).attention_layers]
    assert windows == [None, 5]
    assert_parity(QwenForCausalLM, tmp_path)


def test_the_number_of_experts_is_read_with_its_name_in_hub_files(
    tmp_path: Path, assert_parity, rewrite_config
) -> None:
    write_tiny_checkpoint(tmp_path, "qwen3_moe")
    rewrite_config(tmp_path, remove=("num_local_experts",), num_experts=5)
    assert_parity(QwenForCausalLM, tmp_path)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"num_experts_per_tok": 9}, "num_experts_per_tok 9, but"),
        ({"moe_intermediate_size": None}, "moe_intermediate_size"),
        ({"mlp_only_layers": "0"}, "mlp_only_layers as a list of layers, got '0'"),
        ({"decoder_sparse_step": -1}, "decoder_sparse_step"),
        ({"norm_topk_prob": "yes"}, "norm_topk_prob"),
    ],
)
def test_inconsistent_expert_settings_are_refused(
    entries: dict[str, Any], message: str, tmp_path: Path, new_context, rewrite_config
) -> None:
    write_tiny_checkpoint(tmp_path, "qwen3_moe")
    rewrite_config(tmp_path, **entries)
    with pytest.raises(CheckpointError, match=message):
        QwenForCausalLM(new_context(tmp_path))


@pytest.mark.parametrize("layer_types", [["full_attention"], ["full_attention", "chunked_attention"]])
def test_unknown_layer_types_are_refused(layer_types: list[str], tmp_path: Path, new_context, rewrite_config) -> None:
    write_tiny_checkpoint(tmp_path, "qwen2", config=WINDOW)
    rewrite_config(tmp_path, layer_types=layer_types)
    with pytest.raises(CheckpointError, match="layer_types"):
        QwenForCausalLM(new_context(tmp_path))


def test_another_architecture_is_refused(tmp_path: Path, new_context) -> None:
    write_tiny_checkpoint(tmp_path, "llama")
    with pytest.raises(UnsupportedArchitectureError, match="LlamaForCausalLM"):
        QwenForCausalLM(new_context(tmp_path))


def test_qwen3_heads_have_128_dimensions_by_default(tmp_path: Path, new_context, rewrite_config) -> None:
    write_tiny_checkpoint(tmp_path, "qwen3")
    rewrite_config(tmp_path, remove=("head_dim",))
    assert {layer.head_dim for layer in QwenForCausalLM(new_context(tmp_path)).attention_layers} == {128}


class QwenConformance(ModelConformance):
    family: Family
    entries: ClassVar[dict[str, Any]] = {}

    @pytest.fixture(autouse=True)
    def _write_checkpoint(self, tmp_path: Path) -> None:
        self.folder = write_tiny_checkpoint(tmp_path, self.family, vocab_size=128, config=self.entries)

    def create(self, context: ModelContext) -> Model:
        return QwenForCausalLM(context)

    def checkpoint(self) -> Path:
        return self.folder


class TestQwen2Conformance(QwenConformance):
    family = "qwen2"
    entries: ClassVar[dict[str, Any]] = {**WINDOW, "max_window_layers": 1}


class TestQwen3Conformance(QwenConformance):
    family = "qwen3"


class TestQwen2MoeConformance(QwenConformance):
    family = "qwen2_moe"


class TestQwen3MoeConformance(QwenConformance):
    family = "qwen3_moe"
    entries: ClassVar[dict[str, Any]] = {"mlp_only_layers": [0]}
