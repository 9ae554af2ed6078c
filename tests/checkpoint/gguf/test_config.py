"""The metadata of a GGUF file give the same configuration as the checkpoint's config.json."""

import json

import gguf
import numpy as np
import pytest

from graftlm.checkpoint import load_model_config
from graftlm.errors import CheckpointError, UnsupportedArchitectureError
from graftlm.testing.gguf_files import write_gguf
from graftlm.testing.tiny_models import write_tiny_checkpoint

SIZES = (
    "architectures",
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "rms_norm_eps",
    "rope_parameters",
    "tie_word_embeddings",
    "sliding_window",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "query_pre_attn_scalar",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "norm_topk_prob",
    "original_max_position_embeddings",
)
GEMMA = {"tie_word_embeddings": True, "config": {"query_pre_attn_scalar": 16, "sliding_window": 16}}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 500.0,
    "short_factor": [1.0 + i / 8 for i in range(8)],
    "long_factor": [2.0 + i for i in range(8)],
    "partial_rotary_factor": 1.0,
    "attention_factor": 1.25,
}
ROPES = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}


@pytest.mark.parametrize(
    ("family", "architecture", "settings"),
    [
        ("llama", "llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0}}),
        ("mistral", "llama", {"num_kv_heads": 4}),
        ("qwen2", "qwen2", {"tie_word_embeddings": True}),
        (
            "qwen3",
            "qwen3",
            {
                "head_dim": 24,
                "rope_parameters": {
                    "rope_type": "yarn",
                    "rope_theta": 1e6,
                    "factor": 4.0,
                    "original_max_position_embeddings": 64,
                },
            },
        ),
        ("mixtral", "llama", {}),
        ("qwen3_moe", "qwen3moe", {}),
        ("phi3", "phi3", {"rope_parameters": LONGROPE, "config": {"original_max_position_embeddings": 64}}),
        ("gemma2", "gemma2", GEMMA),
        ("gemma3_text", "gemma3", GEMMA | {"rope_parameters": ROPES}),
    ],
)
def test_metadata_give_the_entries_of_config_json(tmp_path, family, architecture, settings):
    folder = write_tiny_checkpoint(tmp_path / "hf", family, **settings)
    raw = load_model_config(write_gguf(folder, tmp_path / "m.gguf", architecture)).raw
    expected = json.loads((folder / "config.json").read_text())
    names = [
        name for name in SIZES if expected.get(name) is not None and not (family == "qwen2" and name == "head_dim")
    ]
    if family == "phi3":  # transformers repeats two entries in rope_parameters
        names.remove("rope_parameters")
        assert expected["rope_parameters"] | raw["rope_parameters"] == expected["rope_parameters"]
        assert raw["partial_rotary_factor"] == 1
    assert {name: raw[name] for name in names} == {name: expected[name] for name in names}


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def llama3_factors(rope, head_dim):
    """Return transformers' divisors of the frequencies."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = LlamaConfig(hidden_size=head_dim, num_attention_heads=1, head_dim=head_dim, rope_parameters=rope)
    slowed, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = rope["rope_theta"] ** -(np.arange(0, head_dim, 2) / head_dim)
    return (plain / slowed.numpy()).astype(np.float32)


@pytest.mark.parametrize(
    ("rope", "head_dim"),
    [
        (LLAMA3, 128),
        (LLAMA3 | {"factor": 32.0}, 64),
        (LLAMA3 | {"rope_theta": 10000.0, "original_max_position_embeddings": 64}, 16),
    ],
)
def test_llama3_rope_parameters_are_derived_from_the_factors(tmp_path, rope, head_dim):
    folder = write_tiny_checkpoint(
        tmp_path / "hf", head_dim=head_dim, rope_parameters={"rope_type": "default", "rope_theta": rope["rope_theta"]}
    )
    factors = llama3_factors(rope, head_dim)
    file = write_gguf(folder, tmp_path / "m.gguf", tensors={"rope_freqs.weight": factors})
    found = load_model_config(file).raw["rope_parameters"]
    assert found == rope | {"factor": pytest.approx(rope["factor"], rel=1e-5)}


def test_other_frequency_factors_are_refused(tmp_path):
    factors = np.array([1, 3, 2, 9, 1, 1, 1, 1], dtype=np.float32)
    folder = write_tiny_checkpoint(tmp_path / "hf")
    file = write_gguf(folder, tmp_path / "m.gguf", tensors={"rope_freqs.weight": factors})
    with pytest.raises(UnsupportedArchitectureError, match="differ from Llama 3's RoPE"):
        load_model_config(file)


@pytest.mark.parametrize(
    ("kind", "dtype"), [("F32", "float32"), ("F16", "float16"), ("BF16", "bfloat16"), ("Q8_0", "bfloat16")]
)
def test_the_dtype_is_the_type_of_the_matrices(tmp_path, kind, dtype):
    file = write_gguf(write_tiny_checkpoint(tmp_path / "hf"), tmp_path / "m.gguf", kind=kind)
    assert load_model_config(file).raw["dtype"] == dtype


def test_all_end_tokens_are_read(tmp_path):
    ends = {"eos": 3, "eot": 5, "eom": 3}
    metadata = {f"tokenizer.ggml.{name}_token_id": (i, gguf.GGUFValueType.UINT32) for name, i in ends.items()}
    file = write_gguf(write_tiny_checkpoint(tmp_path / "hf"), tmp_path / "m.gguf", metadata=metadata)
    assert load_model_config(file).eos_token_ids == (3, 5)


@pytest.mark.parametrize(
    ("key", "value", "value_type", "message"),
    [
        ("feed_forward_length", [96, 80], gguf.GGUFValueType.ARRAY, "the same for all"),
        ("context_length", 0, gguf.GGUFValueType.UINT32, "context_length must be"),
        ("rope.scaling.type", "ntk", gguf.GGUFValueType.STRING, "'ntk'"),
        ("rope.freq_base", "high", gguf.GGUFValueType.STRING, "rope.freq_base must be a number above 0, got 'high'"),
        ("rope.freq_base", 1e300, gguf.GGUFValueType.FLOAT64, "rope.freq_base must be a number above 0, got 1e"),
        ("attention.head_count", True, gguf.GGUFValueType.BOOL, "head_count must be a whole number above 0"),
    ],
)
def test_metadata_without_a_config_json_equivalent_are_refused(tmp_path, key, value, value_type, message):
    metadata = {f"llama.{key}": (value, value_type)}
    file = write_gguf(write_tiny_checkpoint(tmp_path / "hf"), tmp_path / "m.gguf", metadata=metadata)
    with pytest.raises((CheckpointError, UnsupportedArchitectureError), match=message):
        load_model_config(file)


def test_missing_metadata_are_named(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match=r"has no llama.embedding_length"):
        load_model_config(tmp_path / "m.gguf")
