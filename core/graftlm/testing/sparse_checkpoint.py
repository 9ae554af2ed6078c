"""Writes a Llama checkpoint of any size with almost no disk space: all weights are zeros in a sparse file."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from graftlm.demo import demo_checkpoint

__all__ = ["LlamaShape", "write_sparse_checkpoint"]

_BYTES = 2  # size of a bfloat16 number
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")


@dataclass(frozen=True, slots=True)
class LlamaShape:
    """The sizes of a Llama model with bfloat16 weights."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield the name and shape of every tensor."""
        hidden, inner = self.hidden_size, self.intermediate_size
        q_size, kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        yield "model.embed_tokens.weight", (self.vocab_size, hidden)
        yield "model.norm.weight", (hidden,)
        yield "lm_head.weight", (self.vocab_size, hidden)
        for i in range(self.num_layers):
            layer = f"model.layers.{i}."
            yield f"{layer}input_layernorm.weight", (hidden,)
            yield f"{layer}post_attention_layernorm.weight", (hidden,)
            yield f"{layer}self_attn.q_proj.weight", (q_size, hidden)
            yield f"{layer}self_attn.k_proj.weight", (kv_size, hidden)
            yield f"{layer}self_attn.v_proj.weight", (kv_size, hidden)
            yield f"{layer}self_attn.o_proj.weight", (hidden, q_size)
            yield f"{layer}mlp.gate_proj.weight", (inner, hidden)
            yield f"{layer}mlp.up_proj.weight", (inner, hidden)
            yield f"{layer}mlp.down_proj.weight", (hidden, inner)

    @property
    def weight_bytes(self) -> int:
        """Size of all weights in bytes."""
        return sum(_BYTES * prod(size) for _, size in self.tensors())

    @property
    def kv_bytes_per_token(self) -> int:
        """Size of a token's keys and values in all layers, in bytes."""
        return 2 * _BYTES * self.num_layers * self.num_kv_heads * self.head_dim


def write_sparse_checkpoint(directory: Path, shape: LlamaShape, *, max_position_embeddings: int = 8192) -> Path:
    """Write config.json, weights of zeros, and the bundled model's tokenizer.

    Args:
        directory: an existing folder.
        shape: sizes of the model; the vocabulary must be at least as large as that of the bundled tokenizer.
        max_position_embeddings: longest context in tokens.

    Returns:
        `directory`.
    """
    header: dict[str, Any] = {}
    end = 0
    for name, size in shape.tensors():
        start, end = end, end + _BYTES * prod(size)
        header[name] = {"dtype": "BF16", "shape": size, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (directory / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    (directory / "config.json").write_text(json.dumps(_config(shape, max_position_embeddings)))
    for name in _TOKENIZER_FILES:
        shutil.copy(demo_checkpoint() / name, directory / name)
    return directory


def _config(shape: LlamaShape, max_position_embeddings: int) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "bfloat16",
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": max_position_embeddings,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "eos_token_id": 0,
    }
