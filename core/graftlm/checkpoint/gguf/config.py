"""The config.json that a GGUF file stands for, from its metadata."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from graftlm.checkpoint.gguf.architecture import Architecture, find_architecture
from graftlm.checkpoint.gguf.file import GGUFFile
from graftlm.checkpoint.gguf.rope import rope_parameters
from graftlm.errors import CheckpointError

__all__ = ["architecture_of", "load_gguf_config"]

_EMBEDDING = "token_embd.weight"
#: Tokens that end an answer: of a text, of a turn, of a message that is to be continued.
_END_KEYS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
_DTYPES = {"F32": "float32", "F16": "float16"}
#: Layers of the Gemma models, by architecture, that scale by hidden size over heads, not by the head dim.
_GEMMA_27B_LAYERS = {"gemma2": 46, "gemma3": 62}


def load_gguf_config(path: Path) -> dict[str, Any]:
    """Return what config.json would say of a GGUF file's model.

    `dtype` is that of the file's matrices, or bfloat16 where they are quantized.

    Raises:
        CheckpointError: the file is broken, an entry is missing, or the package `gguf` is.
        UnsupportedArchitectureError: files of this architecture are not read.
    """
    file = GGUFFile(path)
    architecture = architecture_of(file)
    sizes = _sizes(file)
    return sizes | _family(file, architecture, sizes) | {
        "architectures": [architecture.class_name],
        "model_type": architecture.model_type,
        "dtype": _DTYPES.get(file.type_name("blk.0.attn_output.weight"), "bfloat16"),
        "tie_word_embeddings": "output.weight" not in file,
        "bos_token_id": file.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": list(dict.fromkeys(ids for key in _END_KEYS if (ids := file.get(key)) is not None)) or None,
    }  # fmt: skip


def architecture_of(file: GGUFFile) -> Architecture:
    """Return what class of Hugging Face a file's tensors belong to.

    Raises:
        UnsupportedArchitectureError: files of this architecture are not read.
    """
    return find_architecture(
        file.architecture,
        has_windows=bool(file.get("{arch}.attention.sliding_window")),
        has_experts=bool(file.get("{arch}.expert_count")),
    )


def _sizes(file: GGUFFile) -> dict[str, Any]:
    hidden_size, num_heads = _size(file, "embedding_length"), _size(file, "attention.head_count")
    head_dim = file.get("{arch}.attention.key_length") or hidden_size // num_heads
    return {
        "vocab_size": file.shape(_EMBEDDING)[0],
        "hidden_size": hidden_size,
        "intermediate_size": _size(file, "feed_forward_length"),
        "num_hidden_layers": _size(file, "block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": _size(file, "attention.head_count_kv", default=num_heads),
        "head_dim": head_dim,
        "max_position_embeddings": _size(file, "context_length"),
        "rms_norm_eps": _shortest(file.value("{arch}.attention.layer_norm_rms_epsilon")),
        "attention_bias": "blk.0.attn_q.bias" in file,
        "rope_parameters": rope_parameters(file, head_dim),
    }


def _family(file: GGUFFile, architecture: Architecture, sizes: dict[str, Any]) -> dict[str, Any]:
    """Return the entries that only one family has."""
    match architecture.model_type:
        case "llama":
            return {"mlp_bias": "blk.0.ffn_gate.bias" in file}
        case "mistral":
            return {"sliding_window": _size(file, "attention.sliding_window")}
        case "mixtral":
            return {"num_local_experts": _size(file, "expert_count"), "num_experts_per_tok": _experts_used(file)}
        case "qwen3_moe":
            return {
                "num_experts": _size(file, "expert_count"),
                "num_experts_per_tok": _experts_used(file),
                "moe_intermediate_size": _size(file, "expert_feed_forward_length"),
                "norm_topk_prob": True,
                "decoder_sparse_step": 1,
                "mlp_only_layers": [],
            }
        case "gemma2" | "gemma3_text":
            return _gemma(file, sizes)
        case "phi3":
            return _phi3(file, sizes)
    return {}


def _gemma(file: GGUFFile, sizes: dict[str, Any]) -> dict[str, Any]:
    is_27b = sizes["num_hidden_layers"] == _GEMMA_27B_LAYERS[file.architecture]
    scalar = sizes["hidden_size"] // sizes["num_attention_heads"] if is_27b else sizes["head_dim"]
    caps = {
        name: None if (cap := file.get(f"{{arch}}.{name}")) is None else _shortest(cap)
        for name in ("attn_logit_softcapping", "final_logit_softcapping")
    }
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": scalar,
        "sliding_window": _size(file, "attention.sliding_window"),
        **caps,
    }


def _phi3(file: GGUFFile, sizes: dict[str, Any]) -> dict[str, Any]:
    original = file.get("{arch}.rope.scaling.original_context_length")
    return {
        "sliding_window": file.get("{arch}.attention.sliding_window") or None,
        "original_max_position_embeddings": original or sizes["max_position_embeddings"],
        "partial_rotary_factor": _size(file, "rope.dimension_count", default=sizes["head_dim"]) / sizes["head_dim"],
    }


def _experts_used(file: GGUFFile) -> int:
    return _size(file, "expert_used_count")


def _size(file: GGUFFile, key: str, default: int | None = None) -> int:
    """Read a size; where a file gives one for each layer, they have to be equal."""
    key = f"{{arch}}.{key}"
    value = file.get(key) if default is not None else file.value(key)
    value = default if value is None else value
    values = set(value) if isinstance(value, list) else {value}
    if len(values) != 1 or not isinstance(size := values.pop(), int) or size <= 0:
        raise CheckpointError(
            f"{file.path}: {key.replace('{arch}', file.architecture)} must be a whole number above 0, the same for all "
            f"layers, got {value!r}"
        )
    return size


def _shortest(number: float) -> float:
    """Return the shortest decimal that a float32 of the metadata stands for: 1e-6, not 9.999999974752427e-07."""
    return float(str(np.float32(number)))
