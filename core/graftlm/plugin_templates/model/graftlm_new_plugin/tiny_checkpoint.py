"""Writes a small random checkpoint, to try a model: `python -m graftlm_new_plugin.tiny_checkpoint FOLDER`."""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

__all__ = ["write_tiny_checkpoint"]

CONFIG = {
    "architectures": ["graftlm_new_plugin"],
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


def write_tiny_checkpoint(folder: Path) -> Path:
    """Write config.json and model.safetensors to a folder, which is created if necessary; return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    layers = {f"model.layers.{i}.{name}": shape for i in range(2) for name, shape in LAYER_SHAPES.items()}
    draw = torch.Generator().manual_seed(0)
    save_file(
        {name: torch.randn(shape, generator=draw) * 0.3 for name, shape in (SHAPES | layers).items()},
        folder / "model.safetensors",
    )
    return folder


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m graftlm_new_plugin.tiny_checkpoint FOLDER")
    write_tiny_checkpoint(Path(sys.argv[1]))
