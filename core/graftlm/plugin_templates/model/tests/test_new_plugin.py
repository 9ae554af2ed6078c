"""`new-plugin` under graftlm's conformance kit, and what is particular to it."""

import json
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest
import torch
from graftlm.errors import WeightError
from graftlm.testing import ModelConformance
from safetensors.torch import save_file

from graftlm_new_plugin import provide_models

(PROVIDER,) = provide_models()

CONFIG = {
    "architectures": list(PROVIDER.capabilities.architectures),
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "vocab_size": 128,
}

SHAPES = {
    "model.embed_tokens.weight": (128, 48),
    "model.norm.weight": (48,),
    "lm_head.weight": (128, 48),
}
LAYER_SHAPES = {
    "input_layernorm.weight": (48,),
    "self_attn.q_proj.weight": (64, 48),
    "self_attn.k_proj.weight": (32, 48),
    "self_attn.v_proj.weight": (32, 48),
    "self_attn.o_proj.weight": (48, 64),
    "post_attention_layernorm.weight": (48,),
    "mlp.gate_proj.weight": (64, 48),
    "mlp.up_proj.weight": (64, 48),
    "mlp.down_proj.weight": (48, 64),
}


@cache
def tiny_checkpoint() -> Path:
    """A small checkpoint of random weights."""
    folder = Path(mkdtemp(prefix="graftlm-new-plugin-"))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    layers = {f"model.layers.{i}.{name}": shape for i in range(2) for name, shape in LAYER_SHAPES.items()}
    draw = torch.Generator().manual_seed(0)
    save_file(
        {name: torch.randn(shape, generator=draw) * 0.3 for name, shape in (SHAPES | layers).items()},
        folder / "model.safetensors",
    )
    return folder


class TestContract(ModelConformance):
    def create(self, context):
        return PROVIDER.create(PROVIDER.options(), context)

    def checkpoint(self):
        return tiny_checkpoint()


def test_a_tensor_that_it_does_not_know_is_refused_by_name():
    kit = TestContract()
    weights = {**kit.weights(), "model.layers.0.self_attn.q_norm.weight": torch.ones(16)}
    with pytest.raises(WeightError, match="q_norm"):
        kit.model(weights.items())
