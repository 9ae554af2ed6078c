from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from graftlm.contracts import ModelConfig
from graftlm.layers import Frequencies, RotaryEmbedding, rope_frequencies, rotate

CPU = torch.device("cpu")
POSITIONS = torch.tensor([0, 1, 2, 3, 100, 4095, 8191, 100_000])

ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "large theta": {"rope_type": "default", "rope_theta": 5e6},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "yarn": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32768},
    "yarn without original context": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0},
    "yarn with attention factor": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "attention_factor": 1.25},
    "yarn with mscale": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 40.0, "mscale": 0.7, "mscale_all_dim": 1.1},
    "yarn with betas": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "beta_fast": 16, "beta_slow": 2},
    "yarn not truncated": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "truncate": False},
}


def both(rope: dict[str, Any], dtype: torch.dtype) -> tuple[RotaryEmbedding, LlamaRotaryEmbedding]:
    hf_config = LlamaConfig(head_dim=64, max_position_embeddings=2048, rope_parameters=dict(rope))
    config = ModelConfig(("LlamaForCausalLM",), 100, 2048, raw={"rope_parameters": rope})
    return RotaryEmbedding(rope_frequencies(config, 64), device=CPU, dtype=dtype), LlamaRotaryEmbedding(hf_config)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES.keys())
def test_cosines_and_sines_equal_those_of_transformers_bit_by_bit(rope: dict[str, Any], dtype: torch.dtype) -> None:
    ours, theirs = both(rope, dtype)
    cos, sin = (table[:, 0] for table in ours(POSITIONS))
    hf_cos, hf_sin = (table[0] for table in theirs(torch.empty(0, dtype=dtype), POSITIONS[None]))
    assert torch.equal(cos, hf_cos)
    assert torch.equal(sin[:, 32:], hf_sin[:, 32:])
    assert torch.equal(sin[:, :32], -hf_sin[:, :32])


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
def test_rotation_equals_that_of_transformers(dtype: torch.dtype, tolerance: float) -> None:
    ours, theirs = both(ROPES["default"], dtype)
    x = torch.randn(len(POSITIONS), 7, 64).to(dtype)[:, :5]  # strided, like a view of the fused projection
    cos, sin = theirs(x, POSITIONS[None])
    expected, _ = apply_rotary_pos_emb(x, x, cos[0], sin[0])
    got = rotate(x, *ours(POSITIONS))
    assert got.is_contiguous()
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("rotary_dim", [2, 48])
def test_only_the_first_dimensions_are_rotated(rotary_dim: int) -> None:
    rotary = RotaryEmbedding(Frequencies(torch.rand(rotary_dim // 2)), device=CPU, dtype=torch.float32)
    x = torch.randn(len(POSITIONS), 7, 64)[:, :5]
    rotation = rotary(POSITIONS)
    got = rotation(x)
    assert got.is_contiguous()
    assert torch.equal(got[..., rotary_dim:], x[..., rotary_dim:])
    assert torch.equal(got[..., :rotary_dim], rotate(x[..., :rotary_dim], *rotation))


def test_positions_are_not_changed() -> None:
    positions = POSITIONS.clone()
    RotaryEmbedding(Frequencies(torch.ones(4)), device=CPU, dtype=torch.float32)(positions)
    assert torch.equal(positions, POSITIONS)


def test_positions_of_three_axes_rotate_their_sections():
    frequencies = Frequencies(torch.tensor([0.5, 0.25, 0.125]), axes=(0, 2, 1))
    rotary = RotaryEmbedding(frequencies, device=torch.device("cpu"), dtype=torch.float32)
    positions = torch.tensor([[3, 4], [5, 6], [7, 8]])
    cos, sin = rotary(positions)
    for token in range(2):
        angles = positions[[0, 2, 1], token] * frequencies.inv_freq
        torch.testing.assert_close(cos[token, 0], torch.cat([angles, angles]).cos())
        torch.testing.assert_close(sin[token, 0], torch.cat([-angles.sin(), angles.sin()]))
    same = rotary(torch.tensor([4, 9]))
    torch.testing.assert_close(rotary(torch.tensor([[4, 9]] * 3)).cos, same.cos)
