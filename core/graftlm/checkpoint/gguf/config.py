"""Creates the config.json of a GGUF file from its metadata."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from graftlm.checkpoint.gguf.architecture import Architecture, find_architecture
from graftlm.checkpoint.gguf.file import GGUFFile
from graftlm.checkpoint.gguf.rope import rope_parameters

__all__ = ["architecture_of", "load_gguf_config"]

_EMBEDDING = "token_embd.weight"
#: Tokens that end an output: end of text, of a turn, of a message that will be continued.
_END_KEYS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
_DTYPES = {"F32": "float32", "F16": "float16"}
#: Number of layers by which the 27B Gemma models are recognised; in their attention scale, hidden size / number of
#: heads replaces the head dimension.
_GEMMA_27B_LAYERS = {"gemma2": 46, "gemma3": 62}


def load_gguf_config(path: Path) -> dict[str, Any]:
    """Return the config.json of a GGUF file's model.

    `dtype` is the dtype of the file's matrices, or bfloat16 if they are quantized.

    Raises:
        CheckpointError: the file is malformed, or an entry or the package `gguf` is missing.
        UnsupportedArchitectureError: this architecture is not supported.
    """
    file = GGUFFile(path)
    architecture = architecture_of(file)
    sizes = _sizes(file)
    ends = [token_id for key in _END_KEYS if (token_id := file.get(key)) is not None]
    return sizes | _family(file, architecture, sizes) | {
        "architectures": [architecture.class_name],
        "model_type": architecture.model_type,
        "dtype": _DTYPES.get(file.type_name("blk.0.attn_output.weight"), "bfloat16"),
        "tie_word_embeddings": "output.weight" not in file,
        "bos_token_id": file.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": list(dict.fromkeys(ends)) or None,
    }  # fmt: skip


def architecture_of(file: GGUFFile) -> Architecture:
    """Return the architecture of a file's tensors.

    Raises:
        UnsupportedArchitectureError: this architecture is not supported.
    """
    return find_architecture(
        file.architecture,
        has_windows=bool(file.get("{arch}.attention.sliding_window")),
        has_experts=bool(file.get("{arch}.expert_count")),
    )


def _sizes(file: GGUFFile) -> dict[str, Any]:
    hidden_size, num_heads = file.size("{arch}.embedding_length"), file.size("{arch}.attention.head_count")
    head_dim = file.size("{arch}.attention.key_length", default=max(1, hidden_size // num_heads))
    return {
        "vocab_size": file.shape(_EMBEDDING)[0],
        "hidden_size": hidden_size,
        "intermediate_size": file.size("{arch}.feed_forward_length"),
        "num_hidden_layers": file.size("{arch}.block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": file.size("{arch}.attention.head_count_kv", default=num_heads),
        "head_dim": head_dim,
        "max_position_embeddings": file.size("{arch}.context_length"),
        "rms_norm_eps": file.number("{arch}.attention.layer_norm_rms_epsilon"),
        "attention_bias": "blk.0.attn_q.bias" in file,
        "rope_parameters": rope_parameters(file, head_dim),
    }


def _family(file: GGUFFile, architecture: Architecture, sizes: dict[str, Any]) -> dict[str, Any]:
    """Return the entries that only one model family has."""
    match architecture.model_type:
        case "llama":
            return {"mlp_bias": "blk.0.ffn_gate.bias" in file}
        case "mistral":
            return {"sliding_window": file.size("{arch}.attention.sliding_window")}
        case "mixtral":
            return {
                "sliding_window": None,
                "num_local_experts": file.size("{arch}.expert_count"),
                "num_experts_per_tok": file.size("{arch}.expert_used_count"),
            }
        case "qwen3_moe":
            return {
                "num_experts": file.size("{arch}.expert_count"),
                "num_experts_per_tok": file.size("{arch}.expert_used_count"),
                "moe_intermediate_size": file.size("{arch}.expert_feed_forward_length"),
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
        name: file.number(f"{{arch}}.{name}") if file.get(f"{{arch}}.{name}") else None
        for name in ("attn_logit_softcapping", "final_logit_softcapping")
    }
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": scalar,
        "sliding_window": file.size("{arch}.attention.sliding_window"),
        **caps,
    }


def _phi3(file: GGUFFile, sizes: dict[str, Any]) -> dict[str, Any]:
    head_dim, context_len = sizes["head_dim"], sizes["max_position_embeddings"]
    return {
        "sliding_window": file.get("{arch}.attention.sliding_window") or None,  # the converter writes 0 for None
        "original_max_position_embeddings": file.size("{arch}.rope.scaling.original_context_length", context_len),
        "partial_rotary_factor": file.size("{arch}.rope.dimension_count", head_dim) / head_dim,
    }
