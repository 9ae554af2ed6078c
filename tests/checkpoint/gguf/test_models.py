"""A model made from a GGUF file equals the model of the original checkpoint."""

import pytest
import torch

from graftlm.checkpoint import iter_weights, load_model_config
from graftlm.config import EngineConfig
from graftlm.contracts import ModelContext
from graftlm.layers import frequency_bytes
from graftlm.registry import Registry
from graftlm.testing.gguf_files import write_gguf
from graftlm.testing.tiny_models import write_tiny_checkpoint

LONGROPE = {"rope_type": "longrope", "short_factor": [1.5] * 8, "long_factor": [2.0] * 8, "rope_theta": 500.0}
GEMMA = {"tie_word_embeddings": True, "config": {"query_pre_attn_scalar": 16, "sliding_window": 16}}


@pytest.fixture(scope="module")
def registry():
    return Registry.load(EngineConfig.load({}).plugins)


def make_model(registry, path):
    config = load_model_config(path)
    context = ModelContext(config, torch.device("cpu"), torch.float32)
    model = registry.create("model", registry.model_for(config.architectures, "auto"), {}, context)
    model.load_weights(iter_weights(path))
    return model


@pytest.mark.parametrize(
    ("family", "architecture", "settings"),
    [
        ("llama", "llama", {}),
        ("mistral", "llama", {}),
        ("mixtral", "llama", {}),
        ("qwen2", "qwen2", {"tie_word_embeddings": True}),
        ("qwen3", "qwen3", {"head_dim": 24}),
        ("qwen3_moe", "qwen3moe", {}),
        ("phi3", "phi3", {"rope_parameters": LONGROPE, "config": {"original_max_position_embeddings": 64}}),
        ("gemma2", "gemma2", GEMMA),
        ("gemma3_text", "gemma3", GEMMA),
    ],
)
def test_parameters_attention_and_rotation_are_equal(tmp_path, registry, family, architecture, settings):
    folder = write_tiny_checkpoint(tmp_path / "hf", family, **settings)
    own = make_model(registry, folder)
    made = make_model(registry, write_gguf(folder, tmp_path / "m.gguf", architecture))
    assert type(made) is type(own)
    assert made.attention_layers == own.attention_layers
    assert frequency_bytes(made) == frequency_bytes(own)
    parameters = dict(own.named_parameters())
    assert dict(made.named_parameters()).keys() == parameters.keys()
    for name, parameter in made.named_parameters():
        torch.testing.assert_close(parameter, parameters[name], rtol=0, atol=1e-6)
