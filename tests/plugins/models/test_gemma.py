import json
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from graftlm.checkpoint import iter_weights, load_model_config
from graftlm.contracts import Model, ModelContext
from graftlm.errors import CheckpointError, ModelError, UnsupportedArchitectureError
from graftlm.testing.hugging_face import HuggingFaceModel
from graftlm.testing.model import ModelConformance
from graftlm.testing.paged_model import PagedModel
from graftlm.testing.tiny_models import Family, write_tiny_checkpoint
from graftlm_models.gemma import GemmaForCausalLM

WINDOW = {"sliding_window": 4}  # the longest prompts of assert_parity are 8 windows
SLIDING, FULL = "sliding_attention", "full_attention"
MIXED = {**WINDOW, "layer_types": [SLIDING, FULL]}
LINEAR = {"rope_type": "linear", "rope_theta": 1000.0, "factor": 8.0}
LOCAL = {"rope_type": "default", "rope_theta": 100.0}

CASES: dict[str, tuple[Family, dict[str, Any]]] = {
    "gemma2": ("gemma2", {"num_layers": 3, "config": WINDOW}),
    "gemma2 without windows": ("gemma2", {"config": {"layer_types": [FULL] * 2}}),
    "gemma2 without caps": (
        "gemma2",
        {"config": {**WINDOW, "attn_logit_softcapping": None, "final_logit_softcapping": None}},
    ),
    "gemma2 tied": ("gemma2", {"config": WINDOW, "tie_word_embeddings": True}),
    "gemma2 biases": ("gemma2", {"config": {**WINDOW, "attention_bias": True}}),
    "gemma2 wide heads": ("gemma2", {"config": WINDOW, "head_dim": 32, "num_kv_heads": 1}),
    "gemma2 silu": ("gemma2", {"config": {**WINDOW, "hidden_activation": "silu"}}),
    "gemma2 large theta": ("gemma2", {"config": WINDOW, "rope_parameters": {"rope_theta": 1e6}}),
    "gemma3": ("gemma3_text", {"num_layers": 7, "config": WINDOW}),
    "gemma3 mixed layers": ("gemma3_text", {"config": MIXED}),
    "gemma3 rope by layer type": (
        "gemma3_text",
        {"config": MIXED, "rope_parameters": {FULL: LINEAR, SLIDING: LOCAL}},
    ),
    "gemma3 tied": ("gemma3_text", {"config": MIXED, "tie_word_embeddings": True}),
    "gemma3 biases": ("gemma3_text", {"config": {**MIXED, "attention_bias": True}}),
    "gemma3 capped logits": ("gemma3_text", {"config": {**MIXED, "final_logit_softcapping": 5.0}}),
    "gemma3 two files": ("gemma3_text", {"config": MIXED, "shards": 2}),
}


@pytest.mark.parametrize(("family", "sizes"), CASES.values(), ids=CASES.keys())
def test_logits_equal_those_of_transformers(
    family: Family, sizes: dict[str, Any], tmp_path: Path, assert_parity
) -> None:
    assert_parity(GemmaForCausalLM, write_tiny_checkpoint(tmp_path, family, **sizes))


@pytest.mark.parametrize(
    "older",
    [
        {"rope_theta": 1000.0, "rope_local_base_freq": 100.0, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
        {"rope_theta": 500.0, "rope_local_base_freq": 50, "rope_scaling": None},
        {"sliding_window_pattern": 2},
        {},
    ],
    ids=["linear", "no scaling", "pattern", "neither"],
)
def test_older_config_files_of_gemma3_are_read(
    older: dict[str, Any], tmp_path: Path, assert_parity, rewrite_config
) -> None:
    write_tiny_checkpoint(tmp_path, "gemma3_text", num_layers=6, config=WINDOW)
    absent = ("rope_parameters", "layer_types", "_sliding_window_pattern", "attn_logit_softcapping")
    rewrite_config(tmp_path, remove=absent, **older)
    assert_parity(GemmaForCausalLM, tmp_path)


def test_older_config_files_of_gemma2_are_read(tmp_path: Path, assert_parity, rewrite_config) -> None:
    write_tiny_checkpoint(tmp_path, "gemma2", tie_word_embeddings=True, config=WINDOW)
    absent = ("rope_parameters", "layer_types", "tie_word_embeddings", "hidden_activation")
    rewrite_config(tmp_path, remove=absent, rope_theta=500.0, hidden_act="silu")
    assert_parity(GemmaForCausalLM, tmp_path)


@pytest.mark.parametrize(
    ("family", "removed", "entries", "windows"),
    [
        ("gemma2", (), {}, [16, None] * 3),
        ("gemma2", ("layer_types",), {}, [16, None] * 3),
        ("gemma2", ("sliding_window",), {}, [4096, None] * 3),
        ("gemma2", (), {"layer_types": [FULL] * 5 + [SLIDING]}, [None] * 5 + [16]),
        ("gemma2", (), {"layer_types": [FULL] * 6, "sliding_window": None}, [None] * 6),
        ("gemma3_text", (), {}, [16] * 5 + [None]),
        ("gemma3_text", ("layer_types",), {}, [16] * 5 + [None]),
        ("gemma3_text", ("layer_types",), {"sliding_window_pattern": 3}, [16, 16, None] * 2),
    ],
)
def test_each_layer_declares_its_window(
    family: Family,
    removed: tuple[str, ...],
    entries: dict[str, Any],
    windows: list[int | None],
    tmp_path: Path,
    new_context,
    rewrite_config,
) -> None:
    write_tiny_checkpoint(tmp_path, family, num_layers=6)
    rewrite_config(tmp_path, remove=removed, **entries)
    layers = GemmaForCausalLM(new_context(tmp_path)).attention_layers
    assert [layer.sliding_window for layer in layers] == windows


@pytest.mark.parametrize(
    ("family", "removed", "scale", "soft_cap"),
    [
        ("gemma2", (), 24**-0.5, 8.0),
        ("gemma2", ("query_pre_attn_scalar", "attn_logit_softcapping"), 1 / 16, 50.0),
        ("gemma3_text", (), 24**-0.5, None),
        ("gemma3_text", ("query_pre_attn_scalar",), 1 / 16, None),
    ],
)
def test_each_layer_declares_its_scale_and_soft_cap(
    family: Family,
    removed: tuple[str, ...],
    scale: float,
    soft_cap: float | None,
    tmp_path: Path,
    new_context,
    rewrite_config,
) -> None:
    write_tiny_checkpoint(tmp_path, family)
    rewrite_config(tmp_path, remove=removed)
    layers = GemmaForCausalLM(new_context(tmp_path)).attention_layers
    assert {(layer.scale, layer.soft_cap) for layer in layers} == {(scale, soft_cap)}


@pytest.mark.parametrize(
    ("family", "entries", "error", "message"),
    [
        ("gemma2", {"use_bidirectional_attention": True}, UnsupportedArchitectureError, "causal"),
        ("gemma2", {"architectures": ["GemmaForCausalLM"]}, UnsupportedArchitectureError, "GemmaForCausalLM"),
        ("gemma2", {"sliding_window": None}, CheckpointError, "sliding_window is null"),
        ("gemma2", {"layer_types": ["chunked_attention", FULL]}, CheckpointError, "chunked_attention"),
        ("gemma2", {"query_pre_attn_scalar": 0}, CheckpointError, "query_pre_attn_scalar"),
        ("gemma2", {"attn_logit_softcapping": -1}, CheckpointError, "attn_logit_softcapping"),
        ("gemma2", {"final_logit_softcapping": "30"}, CheckpointError, "final_logit_softcapping"),
        ("gemma2", {"hidden_activation": "laplace"}, UnsupportedArchitectureError, "laplace"),
        ("gemma2", {"rope_parameters": {FULL: LINEAR}}, UnsupportedArchitectureError, "per layer type"),
        ("gemma2", {"tie_word_embeddings": 1}, CheckpointError, "tie_word_embeddings"),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, UnsupportedArchitectureError, "set it to null"),
        ("gemma3_text", {"sliding_window_pattern": 0}, CheckpointError, "sliding_window_pattern"),
        ("gemma3_text", {"rope_parameters": {"rope_theta": 1e6}}, CheckpointError, "full_attention and sliding"),
        ("gemma3_text", {"rope_parameters": {FULL: 1e6}}, CheckpointError, "full_attention as an object"),
        ("gemma3_text", {"rope_scaling": "linear"}, CheckpointError, "rope_scaling"),
        ("gemma3_text", {"rope_scaling": {"rope_type": "linear"}}, CheckpointError, "factor"),
        ("gemma3_text", {"rope_scaling": {"rope_type": "spiral"}}, UnsupportedArchitectureError, "spiral"),
    ],
)
def test_a_model_that_cannot_be_served_exactly_is_refused(
    family: Family,
    entries: dict[str, Any],
    error: type[ModelError],
    message: str,
    tmp_path: Path,
    new_context,
    rewrite_config,
) -> None:
    write_tiny_checkpoint(tmp_path, family)
    rewrite_config(tmp_path, **entries)
    with pytest.raises(error, match=message):
        GemmaForCausalLM(new_context(tmp_path))


@pytest.mark.parametrize(
    ("published", "windows"),
    [
        (
            {  # entries of the 2B model
                "architectures": ["Gemma2ForCausalLM"],
                "attention_bias": False,
                "attn_logit_softcapping": 50.0,
                "final_logit_softcapping": 30.0,
                "head_dim": 256,
                "hidden_act": "gelu_pytorch_tanh",
                "hidden_activation": "gelu_pytorch_tanh",
                "hidden_size": 2304,
                "intermediate_size": 9216,
                "max_position_embeddings": 8192,
                "num_attention_heads": 8,
                "num_hidden_layers": 26,
                "num_key_value_heads": 4,
                "query_pre_attn_scalar": 256,
                "rms_norm_eps": 1e-06,
                "rope_theta": 10000.0,
                "sliding_window": 4096,
                "vocab_size": 256000,
            },
            [4096, None] * 13,
        ),
        (
            {  # entries of the 1B model
                "architectures": ["Gemma3ForCausalLM"],
                "attention_bias": False,
                "attn_logit_softcapping": None,
                "final_logit_softcapping": None,
                "head_dim": 256,
                "hidden_activation": "gelu_pytorch_tanh",
                "hidden_size": 1152,
                "intermediate_size": 6912,
                "max_position_embeddings": 32768,
                "num_attention_heads": 4,
                "num_hidden_layers": 26,
                "num_key_value_heads": 1,
                "query_pre_attn_scalar": 256,
                "rms_norm_eps": 1e-06,
                "rope_local_base_freq": 10000,
                "rope_scaling": None,
                "rope_theta": 1000000,
                "sliding_window": 512,
                "sliding_window_pattern": 6,
                "vocab_size": 262144,
            },
            ([512] * 5 + [None]) * 4 + [512] * 2,
        ),
    ],
    ids=["gemma2", "gemma3"],
)
def test_published_config_files_are_read(published: dict[str, Any], windows: list[int | None], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(published))
    context = ModelContext(load_model_config(tmp_path), torch.device("meta"), torch.bfloat16)
    model = GemmaForCausalLM(context)
    assert [layer.sliding_window for layer in model.attention_layers] == windows
    assert {(layer.head_dim, layer.scale) for layer in model.attention_layers} == {(256, 1 / 16)}
    assert model.lm_head is None  # tied, although the file does not say so


@pytest.mark.parametrize("family", ["gemma2", "gemma3_text"])
def test_bfloat16_logits_are_close_to_those_of_transformers(family: Family, tmp_path: Path) -> None:
    checkpoint = write_tiny_checkpoint(tmp_path, family, dtype=torch.bfloat16, config=MIXED)
    model = GemmaForCausalLM(ModelContext(load_model_config(checkpoint), torch.device("cpu"), torch.bfloat16))
    model.load_weights(iter_weights(checkpoint))
    prompt = list(range(40, 72))
    got = model.logits(PagedModel(model, dtype=torch.bfloat16).run_in_chunks(prompt, 9)).float()
    expected = HuggingFaceModel(checkpoint, torch.bfloat16).logits(prompt).float()
    assert float((got - expected).abs().max() / expected.abs().max()) < 0.05


class GemmaConformance(ModelConformance):
    family: ClassVar[Family]

    @pytest.fixture(autouse=True)
    def _write_checkpoint(self, tmp_path: Path) -> None:
        self.folder = write_tiny_checkpoint(tmp_path, self.family, vocab_size=128, config=MIXED)

    def create(self, context: ModelContext) -> Model:
        return GemmaForCausalLM(context)

    def checkpoint(self) -> Path:
        return self.folder


class TestGemma2Conformance(GemmaConformance):
    family = "gemma2"


class TestGemma3Conformance(GemmaConformance):
    family = "gemma3_text"
