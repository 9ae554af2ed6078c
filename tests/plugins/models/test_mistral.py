from pathlib import Path
from typing import Any

import pytest

from graftlm.contracts import Model, ModelContext
from graftlm.errors import CheckpointError, ModelError, UnsupportedArchitectureError
from graftlm.testing.model import ModelConformance
from graftlm.testing.tiny_models import Family, write_tiny_checkpoint
from graftlm_models.mistral import MistralForCausalLM

WINDOW = {"sliding_window": 4}  # the longest prompts of assert_parity are 8 windows

CASES: dict[str, tuple[Family, dict[str, Any]]] = {
    "mistral": ("mistral", {"config": WINDOW}),
    "mistral without windows": ("mistral", {"config": {"sliding_window": None}}),
    "mistral window of one token": ("mistral", {"config": {"sliding_window": 1}}),
    "mistral window past the context": ("mistral", {"config": {"sliding_window": 4096}}),
    "mistral tied": ("mistral", {"config": WINDOW, "tie_word_embeddings": True}),
    "mistral wide heads": ("mistral", {"config": WINDOW, "head_dim": 32, "num_kv_heads": 1}),
    "mistral large theta": ("mistral", {"config": WINDOW, "rope_parameters": {"rope_theta": 1e6}}),
    "mistral two files": ("mistral", {"config": WINDOW, "shards": 2}),
    "mixtral": ("mixtral", {}),
    "mixtral window": ("mixtral", {"config": WINDOW}),
    "mixtral tied": ("mixtral", {"tie_word_embeddings": True}),
    "mixtral one expert of many": ("mixtral", {"config": {"num_local_experts": 40, "num_experts_per_tok": 1}}),
    "mixtral all experts": ("mixtral", {"config": {"num_local_experts": 3, "num_experts_per_tok": 3}}),
    "ministral": ("ministral", {"config": WINDOW}),
    "ministral without windows": ("ministral", {"config": {"layer_types": ["full_attention"] * 2}}),
    "ministral mixed layers": (
        "ministral",
        {"num_layers": 3, "config": {**WINDOW, "layer_types": ["full_attention", *["sliding_attention"] * 2]}},
    ),
}


@pytest.mark.parametrize(("family", "sizes"), CASES.values(), ids=CASES.keys())
def test_logits_equal_those_of_transformers(
    family: Family, sizes: dict[str, Any], tmp_path: Path, assert_parity
) -> None:
    assert_parity(MistralForCausalLM, write_tiny_checkpoint(tmp_path, family, **sizes))


def test_mixtrals_default_theta_is_a_million(tmp_path: Path, assert_parity, rewrite_config) -> None:
    write_tiny_checkpoint(tmp_path, "mixtral")
    rewrite_config(tmp_path, remove=("rope_parameters", "rope_theta"))
    assert_parity(MistralForCausalLM, tmp_path)


@pytest.mark.parametrize(
    ("family", "removed", "entries", "windows"),
    [
        ("mistral", (), {}, [16, 16]),
        ("mistral", ("sliding_window",), {}, [4096, 4096]),
        ("mistral", (), {"sliding_window": None}, [None, None]),
        ("mistral", (), {"layer_types": None}, [16, 16]),
        ("mixtral", (), {}, [None, None]),
        ("mixtral", ("sliding_window",), {}, [None, None]),
        ("mixtral", (), {"sliding_window": 5}, [5, 5]),
        ("ministral", ("layer_types",), {}, [16, 16]),
        ("ministral", ("layer_types",), {"sliding_window": None}, [None, None]),
        ("ministral", (), {"layer_types": ["full_attention", "sliding_attention"]}, [None, 16]),
        ("ministral", (), {"layer_types": ["full_attention"] * 2, "sliding_window": None}, [None, None]),
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
    write_tiny_checkpoint(tmp_path, family)
    rewrite_config(tmp_path, remove=removed, **entries)
    layers = MistralForCausalLM(new_context(tmp_path)).attention_layers
    assert [layer.sliding_window for layer in layers] == windows


@pytest.mark.parametrize(
    ("family", "entries", "error", "message"),
    [
        ("mistral", {"layer_types": ["full_attention"] * 2}, UnsupportedArchitectureError, "MinistralForCausalLM"),
        ("mistral", {"sliding_window": 0}, CheckpointError, "sliding_window"),
        ("mistral", {"sliding_window": "4096"}, CheckpointError, "sliding_window"),
        ("mistral", {"attention_bias": True}, UnsupportedArchitectureError, "attention_bias"),
        ("mistral", {"mlp_bias": True}, UnsupportedArchitectureError, "mlp_bias"),
        ("mistral", {"quantization_config": {"quant_method": "mxfp4"}}, UnsupportedArchitectureError, "mxfp4"),
        ("mixtral", {"layer_types": ["full_attention"] * 2}, UnsupportedArchitectureError, "layers of MixtralFor"),
        ("mixtral", {"num_local_experts": None}, CheckpointError, "num_experts as a whole number"),
        ("mixtral", {"num_experts_per_tok": 4}, CheckpointError, "num_experts_per_tok 4, but num_local_experts is 3"),
        ("mixtral", {"hidden_act": "laplace"}, UnsupportedArchitectureError, "laplace"),
        ("ministral", {"sliding_window": None}, CheckpointError, "sliding_window is null"),
        ("ministral", {"layer_types": ["full_attention"]}, CheckpointError, "layer_types as 2"),
        ("ministral", {"layer_types": ["chunked_attention"] * 2}, CheckpointError, "chunked_attention"),
        ("ministral", {"layer_types": 2}, CheckpointError, "layer_types"),
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
        MistralForCausalLM(new_context(tmp_path))


class TestMistralConformance(ModelConformance):
    @pytest.fixture(autouse=True)
    def _write_checkpoint(self, tmp_path: Path) -> None:
        self.folder = write_tiny_checkpoint(tmp_path, "mistral", vocab_size=128, config=WINDOW)

    def create(self, context: ModelContext) -> Model:
        return MistralForCausalLM(context)

    def checkpoint(self) -> Path:
        return self.folder


class TestMixtralConformance(ModelConformance):
    @pytest.fixture(autouse=True)
    def _write_checkpoint(self, tmp_path: Path) -> None:
        self.folder = write_tiny_checkpoint(tmp_path, "mixtral", vocab_size=128, config=WINDOW)

    def create(self, context: ModelContext) -> Model:
        return MistralForCausalLM(context)

    def checkpoint(self) -> Path:
        return self.folder
