"""Quantization in an engine: tokens, log lines, refusals, and its effect on stored keys and values."""

import json
import logging
import shutil

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from graftlm import Engine, SamplingParams
from graftlm.assembly.fingerprint import model_fingerprint
from graftlm.assembly.weight_digests import WeightDigests
from graftlm.config import EngineConfig, QuantizationSettings
from graftlm.errors import ConfigError, UnknownProviderError
from graftlm.testing.hugging_face import HuggingFaceModel
from graftlm_quantization.coded_matrix import encode

MAX_TOKENS = 12

#: Model, quantization, bits and group size. One model has biases and tied weights, one has experts.
CASES = [
    ("llama", "int4", {"group_size": 32}, 4),
    ("llama", "int8", {}, 8),
    ("qwen2", "int4", {"group_size": 32, "kernel": "torch"}, 4),
    ("qwen2", "int8", {"group_size": 32}, 8),
    ("qwen3-moe", "int8", {"kernel": "torch"}, 8),
]


def decoded_checkpoint(folder, path, bits, group_size):
    """Write a checkpoint whose projections are encoded and decoded."""
    shutil.copytree(folder, path)
    for file in path.glob("*.safetensors"):
        weights = load_file(file)
        for name, weight in weights.items():
            if name.endswith("_proj.weight"):
                matrix = encode(weight, bits, group_size or weight.shape[1])
                weights[name] = matrix.decoded(0, matrix.num_blocks).contiguous()
        save_file(weights, file, metadata={"format": "pt"})
    return path


@pytest.mark.parametrize(("model", "name", "options", "bits"), CASES)
def test_tokens_equal_those_of_transformers_with_the_decoded_weights(checkpoint, tmp_path, model, name, options, bits):
    folder = checkpoint(model)
    decoded = decoded_checkpoint(folder, tmp_path / "decoded", bits, options.get("group_size"))
    rng = np.random.default_rng(5)
    prompts = [rng.integers(1, 300, size).tolist() for size in (1, 2, 9, 40, 70)]
    oracle = HuggingFaceModel(decoded)
    expected = [oracle.generate(prompt, MAX_TOKENS) for prompt in prompts]
    config = {
        "model": {"path": str(folder), "quantization": {"name": name, "options": options}},
        "memory": {"kv_tokens": 1024},
        "scheduling": {"prefill_tokens_per_step": 32},
    }
    with Engine(EngineConfig(**config)) as engine:
        outputs = engine.generate(prompts, SamplingParams(max_tokens=MAX_TOKENS, temperature=0))
    assert [list(output.token_ids) for output in outputs] == expected


def test_the_log_has_the_saved_memory_and_the_plain_layers(checkpoint, caplog):
    options = {"group_size": 32, "keep": ["lm_head", "o_proj"], "kernel": "torch"}
    model = {"path": str(checkpoint("llama")), "quantization": {"name": "int4", "options": options}}
    with (
        caplog.at_level(logging.INFO, "graftlm.assembly.quantization"),
        Engine(model=model, memory={"kv_tokens": 256}),
    ):
        pass
    assert (
        "6 linear layers are quantized by int4: 0.0 MB instead of 0.2 MB, 0.2 MB saved; not quantized: " in caplog.text
    )
    assert "layers.0.attention.out (option keep names o_proj), layers.1.attention.out" in caplog.text


@pytest.mark.parametrize(
    ("model", "error", "message"),
    [
        ({"quantization": "int5"}, UnknownProviderError, "Unknown quantization 'int5'. Available: fp8, int4, int8"),
        (
            {"quantization": {"name": "int4", "options": {"group_size": 48}}},
            ConfigError,
            "model.quantization.options.group_size",
        ),
        (
            {"quantization": "int4", "dtype": "float16"},
            ConfigError,
            "quantization 'int4' does not fit this engine: it computes in float32, bfloat16, "
            "but the model computes in float16",
        ),
        (
            {"quantization": {"name": "int4", "options": {"group_size": 128, "kernel": "torch"}}},
            ConfigError,
            "quantization 'int4' cannot quantize any layer of this model: layers.0.attention.qkv: its number of "
            "inputs, 64, is not a multiple of 128",
        ),
    ],
)
def test_an_impossible_quantization_is_refused(checkpoint, model, error, message):
    with pytest.raises(error) as caught:
        Engine(model={"path": str(checkpoint("llama"))} | model)
    assert message in str(caught.value)


def test_keys_and_values_of_another_quantization_are_not_shared(checkpoint):
    variants = [
        None,
        QuantizationSettings(),
        QuantizationSettings(name="int4"),
        QuantizationSettings(name="int8"),
        QuantizationSettings(name="int4", options={"group_size": 32}),
    ]
    prints = [
        model_fingerprint(checkpoint("llama"), "float32", (), WeightDigests(None), variant) for variant in variants
    ]
    assert prints[0] == prints[1]
    assert len(set(prints)) == len(variants) - 1


def test_options_may_be_set_on_the_command_line():
    config = EngineConfig.load(overrides=["model.quantization=int4", "model.quantization.options.group_size=32"])
    assert json.loads(config.model.quantization.model_dump_json()) == {"name": "int4", "options": {"group_size": 32}}
