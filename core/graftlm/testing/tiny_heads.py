"""Writes small random draft heads in the formats in which heads are published."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

__all__ = ["add_tiny_mtp", "eagle3_tensors", "write_tiny_eagle3"]


def write_tiny_eagle3(
    directory: Path,
    form: Literal["plain", "speculators"] = "plain",
    seed: int = 0,
    *,
    hidden_size: int = 64,
    served_size: int = 64,
    vocab_size: int = 320,
    draft_vocab_size: int = 100,
    hidden_layers: tuple[int, ...] | None = (1, 1, 2),
    embedding: bool = False,
    config: Mapping[str, Any] | None = None,
) -> Path:
    """Write config.json and model.safetensors of an EAGLE-3 head.

    Args:
        directory: folder of the checkpoint. It is created if necessary, and its files are replaced.
        form: "plain": the form of the class LlamaForCausalLMEagle3; "speculators": that of the library of this name.
        seed: seed of the weights.
        hidden_size, served_size: size of hidden states of the head and of the served model.
        vocab_size: size of the served model's vocabulary.
        draft_vocab_size: number of tokens that the head drafts; if it is `vocab_size`, there are no vocabulary maps.
        hidden_layers: layers whose inputs the head reads; None: three, and config.json does not name them.
        embedding: whether the checkpoint has a token embedding.
        config: other entries of config.json.

    Returns: `directory`.
    """
    layer: dict[str, Any] = {
        "model_type": "llama",
        "hidden_size": hidden_size,
        "intermediate_size": 96,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": vocab_size,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
    }
    entries: dict[str, Any] = {"draft_vocab_size": draft_vocab_size, "target_hidden_size": served_size}
    if hidden_layers is not None:
        entries["eagle_aux_hidden_state_layer_ids"] = list(hidden_layers)
    if form == "plain":
        entries |= {"architectures": ["LlamaForCausalLMEagle3"], **layer}
    else:
        entries |= {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "transformer_layer_config": layer,
            "norm_before_residual": True,
        }
    tensors = eagle3_tensors(
        "midlayer." if form == "plain" else "layers.0.",
        seed,
        hidden_size,
        served_size * len(hidden_layers or (0, 0, 0)),
        vocab_size,
        draft_vocab_size,
        embedding=embedding,
    )
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps({**entries, **(config or {})}), encoding="utf-8")
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def eagle3_tensors(
    layer: str,
    seed: int,
    hidden_size: int,
    input_size: int,
    vocab_size: int,
    draft_vocab_size: int,
    *,
    embedding: bool = False,
) -> dict[str, Tensor]:
    """Return the random tensors of a head with 4 query heads and 2 key heads of 16 numbers.

    Args:
        layer: prefix of the names of the layer's tensors.
        input_size: size of the hidden states that `fc` reads.
        embedding: whether there is a token embedding.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) * 0.2

    tensors = {
        "fc.weight": draw(hidden_size, input_size),
        f"{layer}self_attn.q_proj.weight": draw(64, 2 * hidden_size),
        f"{layer}self_attn.k_proj.weight": draw(32, 2 * hidden_size),
        f"{layer}self_attn.v_proj.weight": draw(32, 2 * hidden_size),
        f"{layer}self_attn.o_proj.weight": draw(hidden_size, 64),
        f"{layer}mlp.gate_proj.weight": draw(96, hidden_size),
        f"{layer}mlp.up_proj.weight": draw(96, hidden_size),
        f"{layer}mlp.down_proj.weight": draw(hidden_size, 96),
        "lm_head.weight": draw(draft_vocab_size, hidden_size),
    }
    for name in (*(f"{layer}{n}" for n in ("input_layernorm", "hidden_norm", "post_attention_layernorm")), "norm"):
        tensors[f"{name}.weight"] = 1 + draw(hidden_size)
    if embedding:
        tensors["embed_tokens.weight"] = draw(vocab_size, hidden_size)
    if draft_vocab_size != vocab_size:
        targets = torch.randperm(vocab_size, generator=generator)[:draft_vocab_size].sort().values
        tensors["d2t"] = targets - torch.arange(draft_vocab_size)
        tensors["t2d"] = torch.zeros(vocab_size, dtype=torch.bool).index_fill_(0, targets, True)
    return tensors


def add_tiny_mtp(directory: Path, seed: int = 0) -> Path:
    """Add a random MTP layer to a checkpoint of a DeepSeek V3 model with one file of weights; return `directory`.

    The layer has the shapes of the last served layer.
    """
    file, config_file = directory / "model.safetensors", directory / "config.json"
    config = json.loads(config_file.read_text(encoding="utf-8"))
    num_layers, size = config["num_hidden_layers"], config["hidden_size"]
    last, own = f"model.layers.{num_layers - 1}.", f"model.layers.{num_layers}."
    generator = torch.Generator().manual_seed(seed)
    tensors = load_file(file)
    for name in sorted(tensors):
        if name.startswith(last):
            noise = torch.randn(tensors[name].shape, generator=generator) * 0.2
            tensors[own + name.removeprefix(last)] = noise + ("norm" in name)
    for name in ("enorm", "hnorm", "shared_head.norm"):
        tensors[f"{own}{name}.weight"] = 1 + torch.randn(size, generator=generator) * 0.2
    tensors[f"{own}eh_proj.weight"] = torch.randn(size, 2 * size, generator=generator) * 0.2
    tensors[f"{own}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors[f"{own}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    config["num_nextn_predict_layers"] = 1
    config_file.write_text(json.dumps(config), encoding="utf-8")
    save_file(tensors, file, metadata={"format": "pt"})
    return directory
