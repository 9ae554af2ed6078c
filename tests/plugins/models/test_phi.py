from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from graftlm.contracts import Model, ModelContext
from graftlm.errors import CheckpointError, ModelError, UnsupportedArchitectureError
from graftlm.layers import frequency_bytes
from graftlm.testing.model import ModelConformance
from graftlm.testing.tiny_models import write_tiny_checkpoint
from graftlm_models.phi import PhiForCausalLM

# transformers requires hidden_size / num_heads if only a part of each head is rotated
HEADS = {"num_heads": 4, "head_dim": 16}
WINDOW = {"sliding_window": 4}  # the longest prompts of assert_parity are 8 windows
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 500.0,
    "short_factor": [1.0 + i / 8 for i in range(8)],
    "long_factor": [2.0 + i for i in range(8)],
}
PARTIAL = {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.75}

CASES: dict[str, dict[str, Any]] = {
    "phi3": {},
    "window": {"config": WINDOW},
    "as many kv heads": {"num_kv_heads": 4},
    "heads wider than hidden": {"head_dim": 32},
    "tied": {"tie_word_embeddings": True},
    "three quarters of a head turn": {**HEADS, "rope_parameters": PARTIAL},
    "half of a head turns, tied, window": {
        **HEADS,
        "tie_word_embeddings": True,
        "rope_parameters": {**PARTIAL, "partial_rotary_factor": 0.5},
        "config": WINDOW,
    },
    "longrope in contexts as trained": {"rope_parameters": LONGROPE},
    "longrope that does not stretch": {
        "rope_parameters": LONGROPE,
        "config": {"original_max_position_embeddings": 256},
    },
    "two files": {"shards": 2},
}


def in_context(context_len: int) -> Callable[[ModelContext], Model]:
    """Return a function that makes the model for an engine with this maximum context length."""
    return lambda context: PhiForCausalLM(replace(context, context_len=context_len))


@pytest.mark.parametrize("sizes", CASES.values(), ids=CASES.keys())
def test_logits_equal_those_of_transformers(sizes: dict[str, Any], tmp_path: Path, assert_parity) -> None:
    original = {"original_max_position_embeddings": 64}
    sizes = {**sizes, "config": original | sizes.get("config", {})}
    assert_parity(in_context(64), write_tiny_checkpoint(tmp_path, "phi3", **sizes))


def test_longrope_in_longer_contexts_equals_transformers_for_longer_prompts(tmp_path: Path, assert_parity) -> None:
    """All prompts of assert_parity are longer than 8 tokens except one, whose only position 0 is not rotated."""
    config = {"original_max_position_embeddings": 8}
    write_tiny_checkpoint(tmp_path, "phi3", rope_parameters=LONGROPE, config=config)
    assert_parity(in_context(64), tmp_path)


def test_longrope_of_phi4_mini_equals_transformers(tmp_path: Path, assert_parity, rewrite_config) -> None:
    """Its config.json names the rotated share of a head beside the rope parameters; so do the older files."""
    factors = {"short_factor": [1.0 + i / 8 for i in range(6)], "long_factor": [2.0 + i for i in range(6)]}
    config = {"original_max_position_embeddings": 8}
    write_tiny_checkpoint(tmp_path, "phi3", **HEADS, tie_word_embeddings=True, config=config)
    rope = {"rope_scaling": {"type": "longrope", **factors}, "rope_theta": 500.0, "partial_rotary_factor": 0.75}
    rewrite_config(tmp_path, remove=("rope_parameters",), **rope)
    assert_parity(in_context(64), tmp_path)


def test_keys_of_engines_with_different_contexts_are_distinguished(tmp_path: Path, new_context) -> None:
    config = {"original_max_position_embeddings": 64}
    write_tiny_checkpoint(tmp_path, "phi3", rope_parameters=LONGROPE, config=config)
    prints = [frequency_bytes(in_context(length)(new_context(tmp_path))) for length in (32, 64, 65, 256)]
    assert prints[0] == prints[1] != prints[2] == prints[3]


@pytest.mark.parametrize(
    ("entries", "window"), [({}, None), ({"sliding_window": None}, None), (WINDOW, 4), ({"sliding_window": 256}, None)]
)
def test_all_layers_declare_the_window(
    entries: dict[str, Any], window: int | None, tmp_path: Path, new_context, rewrite_config
) -> None:
    write_tiny_checkpoint(tmp_path, "phi3")
    rewrite_config(tmp_path, remove=("sliding_window",), **entries)
    layers = PhiForCausalLM(new_context(tmp_path)).attention_layers
    assert [layer.sliding_window for layer in layers] == [window, window]


@pytest.mark.parametrize(
    ("entries", "error", "message"),
    [
        ({"sliding_window": "2047"}, CheckpointError, "sliding_window"),
        ({"rope_parameters": {"rope_type": "spiral"}}, UnsupportedArchitectureError, "spiral"),
        ({"rope_parameters": {"rope_type": "longrope"}}, CheckpointError, "short_factor as 8 numbers"),
        ({"rope_parameters": None, "partial_rotary_factor": 0.2}, CheckpointError, "is 3 dimensions; expected an even"),
        ({"quantization_config": {"quant_method": "aqlm"}}, UnsupportedArchitectureError, "aqlm"),
    ],
)
def test_a_model_that_cannot_be_served_is_refused(
    entries: dict[str, Any], error: type[ModelError], message: str, tmp_path: Path, new_context, rewrite_config
) -> None:
    write_tiny_checkpoint(tmp_path, "phi3")
    rewrite_config(tmp_path, **entries)
    with pytest.raises(error, match=message):
        PhiForCausalLM(new_context(tmp_path))


class TestPhiConformance(ModelConformance):
    @pytest.fixture(autouse=True)
    def _write_checkpoint(self, tmp_path: Path) -> None:
        sizes = {**HEADS, "rope_parameters": PARTIAL, "config": WINDOW}
        self.folder = write_tiny_checkpoint(tmp_path, "phi3", vocab_size=128, **sizes)

    def create(self, context: ModelContext) -> Model:
        return PhiForCausalLM(context)

    def checkpoint(self) -> Path:
        return self.folder
