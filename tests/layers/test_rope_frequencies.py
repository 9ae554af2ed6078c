"""Frequencies equal those of Transformers for every supported rope type."""

import logging
import math
import re
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from graftlm.contracts import ModelConfig
from graftlm.errors import CheckpointError, UnsupportedArchitectureError
from graftlm.layers import rope_frequencies

HEAD_DIM, ORIGINAL, LONGEST = 64, 512, 2048

LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "original_max_position_embeddings": ORIGINAL,
    "short_factor": [1 + i / 32 for i in range(HEAD_DIM // 2)],
    "long_factor": [2 + i / 4 for i in range(HEAD_DIM // 2)],
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": ORIGINAL,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": ORIGINAL}

#: name -> (rope parameters, maximum context)
CASES: dict[str, tuple[dict[str, Any], int]] = {
    "linear": ({"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0}, LONGEST),
    "dynamic": ({"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}, LONGEST),
    "dynamic in a short context": ({"rope_type": "dynamic", "rope_theta": 1e6, "factor": 2.0}, 100),
    "llama3": (LLAMA3, LONGEST),
    "yarn": (YARN, LONGEST),
    "yarn of DeepSeek": ({**YARN, "factor": 40.0, "mscale": 0.707, "mscale_all_dim": 0.707}, LONGEST),
    "yarn not truncated": ({**YARN, "truncate": False, "beta_fast": 16, "beta_slow": 2}, LONGEST),
    "longrope as trained": (LONGROPE, ORIGINAL),
    "longrope beyond": (LONGROPE, ORIGINAL + 1),
    "longrope with a factor": ({**LONGROPE, "factor": 32.0}, LONGEST),
    "longrope with attention factor": ({**LONGROPE, "attention_factor": 1.25}, LONGEST),
    "longrope that does not stretch": ({**LONGROPE, "factor": 1.0}, ORIGINAL),
}
PARTIAL = [name for name in CASES if "longrope" not in name]


def frequencies(rope: dict[str, Any], context_len: int = LONGEST, **options: Any):
    config = ModelConfig(("A",), 100, LONGEST, raw={"rope_parameters": rope})
    return rope_frequencies(config, HEAD_DIM, context_len=context_len, **options)


def assert_as_in_transformers(rope: dict[str, Any], context_len: int, **options: Any) -> None:
    hf_config = LlamaConfig(head_dim=HEAD_DIM, max_position_embeddings=LONGEST, rope_parameters=dict(rope))
    inv_freq, scaling = ROPE_INIT_FUNCTIONS[rope["rope_type"]](hf_config, seq_len=context_len)
    got = frequencies(rope, context_len, **options)
    assert torch.equal(got.inv_freq, inv_freq)
    assert got.scaling == scaling


@pytest.mark.parametrize(("rope", "context_len"), CASES.values(), ids=CASES.keys())
def test_frequencies_equal_those_of_transformers_bit_by_bit(rope: dict[str, Any], context_len: int) -> None:
    assert_as_in_transformers(rope, context_len)


@pytest.mark.parametrize("name", PARTIAL)
def test_partial_rotation_equals_transformers(name: str) -> None:
    rope, context_len = CASES[name]
    assert_as_in_transformers({**rope, "partial_rotary_factor": 0.75}, context_len, partial=True)
    assert len(frequencies({**rope, "partial_rotary_factor": 0.75}, partial=True).inv_freq) == 24


def test_partial_rotation_with_longrope_equals_transformers() -> None:
    lists = {"short_factor": [1.5] * 16, "long_factor": [3.0] * 16}
    for context_len in (ORIGINAL, LONGEST):
        assert_as_in_transformers({**LONGROPE, **lists, "partial_rotary_factor": 0.5}, context_len, partial=True)


def test_other_rope_types_of_transformers_are_refused_by_name() -> None:
    served = {rope["rope_type"] for rope, _ in CASES.values()}
    others = set(ROPE_INIT_FUNCTIONS) - served
    assert others == {"proportional"}  # types of models that run only as Transformers' own modules
    with pytest.raises(UnsupportedArchitectureError, match=r"proportional.*default, dynamic, linear, llama3, longrope"):
        frequencies({"rope_type": "proportional"})


@pytest.mark.parametrize("old_name", ["su", "yarn"])
def test_names_in_old_longrope_files_are_read(old_name: str) -> None:
    old = {**{k: v for k, v in LONGROPE.items() if k != "rope_type"}, "type": old_name}
    assert torch.equal(frequencies(old).inv_freq, frequencies(LONGROPE).inv_freq)


def test_longrope_that_differs_from_transformers_causes_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        frequencies(LONGROPE, ORIGINAL)
        assert not caplog.records
        frequencies(LONGROPE, LONGEST)
    assert f"results for contexts of up to {ORIGINAL} tokens differ" in caplog.text
    assert f"set model.context_len: {ORIGINAL}" in caplog.text


def test_without_a_given_context_the_checkpoints_context_is_used() -> None:
    config = ModelConfig(("A",), 100, LONGEST, raw={"rope_parameters": LONGROPE})
    assert torch.equal(rope_frequencies(config, HEAD_DIM).inv_freq, frequencies(LONGROPE, LONGEST).inv_freq)


def test_theta_has_a_default_if_the_file_has_none() -> None:
    expected = frequencies({"rope_theta": 1e6}).inv_freq
    assert torch.equal(frequencies({}, default_theta=1e6).inv_freq, expected)
    assert torch.equal(frequencies({"rope_theta": 1e6}, default_theta=5.0).inv_freq, expected)


def test_an_outer_original_context_has_precedence_over_an_inner_one() -> None:
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
    raw = {"rope_parameters": rope, "original_max_position_embeddings": 512}
    outer = rope_frequencies(ModelConfig(("A",), 100, 2048, raw=raw), 64)
    inner = rope_frequencies(ModelConfig(("A",), 100, 2048, raw={"rope_parameters": rope}), 64)
    wanted = {**rope, "original_max_position_embeddings": 512}
    expected = rope_frequencies(ModelConfig(("A",), 100, 2048, raw={"rope_parameters": wanted}), 64)
    assert torch.equal(outer.inv_freq, expected.inv_freq)
    assert not torch.equal(outer.inv_freq, inner.inv_freq)


@pytest.mark.parametrize(
    ("rope", "options", "error", "message"),
    [
        ({"partial_rotary_factor": 0.5}, {}, UnsupportedArchitectureError, "partial_rotary_factor 0.5, but this"),
        ({"partial_rotary_factor": "half"}, {"partial": True}, CheckpointError, "partial_rotary_factor as a number"),
        ({"partial_rotary_factor": 2.0}, {"partial": True}, CheckpointError, "128 dimensions; expected"),
        ({"partial_rotary_factor": 0.4}, {"partial": True}, CheckpointError, "25 dimensions; expected"),
        ({"partial_rotary_factor": 0.01}, {"partial": True}, CheckpointError, "is 0 dimensions; expected"),
        ({**LONGROPE, "long_factor": [1.0]}, {}, CheckpointError, r"long_factor as 32 numbers above 0, got \[1.0\]"),
        ({**LONGROPE, "short_factor": [0.0] * 32}, {}, CheckpointError, "short_factor as 32"),
        ({**LONGROPE, "short_factor": None}, {}, CheckpointError, "short_factor as 32 numbers above 0, got None"),
        ({**LONGROPE, "attention_factor": -1}, {}, CheckpointError, "attention_factor"),
        ({**LONGROPE, "original_max_position_embeddings": "x"}, {}, CheckpointError, "original_max_position"),
        ({"rope_type": "linear"}, {}, CheckpointError, "factor"),
        ({"rope_theta": "big"}, {}, CheckpointError, "rope_theta"),
        ({"rope_theta": 1.0}, {}, CheckpointError, "rope_theta as a number above 1, got 1.0"),
        ({"rope_theta": 1e-300}, {}, CheckpointError, "rope_theta as a number above 1, got 1e-300"),
        ({"rope_theta": math.inf}, {}, CheckpointError, "rope_theta as a number above 1, got inf"),
        ({"rope_theta": 10**400}, {}, CheckpointError, "rope_theta as a number above 1, got 1000"),
        ({"rope_type": ["yarn"]}, {}, CheckpointError, "rope_type as a text, got ['yarn']"),
        ({"rope_type": "linear", "factor": math.inf}, {}, CheckpointError, "factor as a number above 0, got inf"),
        ({"rope_type": "linear", "factor": math.nan}, {}, CheckpointError, "factor as a number above 0, got nan"),
        ({"rope_type": "linear", "factor": 1e-320}, {}, CheckpointError, "give no finite frequencies above 0"),
        ({**LLAMA3, "low_freq_factor": 4.0}, {}, CheckpointError, "low_freq_factor below high_freq_factor, got 4.0"),
        ({**LLAMA3, "low_freq_factor": 5.0}, {}, CheckpointError, "low_freq_factor below high_freq_factor, got 5.0"),
        ({**YARN, "beta_fast": "32"}, {}, CheckpointError, "beta_fast as a number above 0, got '32'"),
        ({**YARN, "beta_fast": -1}, {}, CheckpointError, "beta_fast as a number above 0, got -1"),
        ({**YARN, "beta_slow": 33}, {}, CheckpointError, "beta_fast no less than beta_slow, got 32 and 33"),
        ({**YARN, "original_max_position_embeddings": 10**400}, {}, CheckpointError, "embeddings as a number above 1"),
        ({**LONGROPE, "original_max_position_embeddings": 1}, {}, CheckpointError, "embeddings as a number above 1"),
        ({**LONGROPE, "long_factor": [math.inf] * 32}, {}, CheckpointError, "long_factor as 32 numbers above 0"),
    ],
)
def test_invalid_parameters_are_refused(
    rope: dict[str, Any], options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message if "\\" in message else re.escape(message)):
        frequencies(rope, **options)


def test_a_context_beyond_float32_is_refused_for_longrope() -> None:
    config = ModelConfig(("A",), 100, 10**400, raw={"rope_parameters": LONGROPE})
    with pytest.raises(CheckpointError, match="needs max_position_embeddings as a number above 0"):
        rope_frequencies(config, HEAD_DIM, context_len=LONGEST)
