"""Writes small checkpoints as GGUF files with the package `gguf`, like llama.cpp's converter."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFValueType, GGUFWriter, TokenType
from numpy.typing import NDArray

from graftlm.checkpoint import iter_weights

__all__ = ["write_gguf"]

#: Entry of config.json -> method of `GGUFWriter` that writes this entry.
_SIZES = {
    "num_hidden_layers": "add_block_count",
    "max_position_embeddings": "add_context_length",
    "hidden_size": "add_embedding_length",
    "intermediate_size": "add_feed_forward_length",
    "num_attention_heads": "add_head_count",
    "num_key_value_heads": "add_head_count_kv",
    "rms_norm_eps": "add_layer_norm_rms_eps",
    "head_dim": "add_key_length",
    "sliding_window": "add_sliding_window",
    "num_local_experts": "add_expert_count",
    "num_experts": "add_expert_count",
    "num_experts_per_tok": "add_expert_used_count",
    "moe_intermediate_size": "add_expert_feed_forward_length",
    "attn_logit_softcapping": "add_attn_logit_softcapping",
    "final_logit_softcapping": "add_final_logit_softcapping",
}


_EXPERT = re.compile(r"(?P<before>.*\.experts)\.(?P<number>\d+)(?P<after>\..*)")


def write_gguf(
    checkpoint: Path,
    file: Path,
    architecture: str = "llama",
    kind: str = "F32",
    *,
    tokenizer: bool = False,
    metadata: Mapping[str, tuple[Any, GGUFValueType]] | None = None,
    tensors: Mapping[str, NDArray[np.float32]] | None = None,
    tensors_per_file: int = 0,
) -> Path:
    """Write a checkpoint of unquantised weights as a GGUF file.

    Args:
        checkpoint: folder of the checkpoint.
        file: path of the file to write.
        architecture: llama.cpp's name of the architecture: llama (also for Mistral and Mixtral), qwen2, qwen3,
            qwen3moe, gemma2, gemma3 or phi3.
        kind: storage format of matrices: F32, F16, BF16, Q8_0, Q4_0, ... Norms and biases are F32.
        tokenizer: whether to write the checkpoint's tokenizer, which must be a byte-level BPE.
        metadata: key -> (value, type); these entries replace the checkpoint's entries.
        tensors: additional tensors: name in the file -> values.
        tensors_per_file: maximum number of tensors in a file; 0: one file for all tensors.

    Returns:
        The path `file`. If there are several files, their names are "name-00001-of-00002.gguf" and so on.
    """
    config = json.loads((checkpoint / "config.json").read_text())
    writer = GGUFWriter(file, architecture, split_max_tensors=tensors_per_file)
    _add_config(writer, config)
    if tokenizer:
        _add_tokenizer(writer, checkpoint)
    for key, (value, value_type) in (metadata or {}).items():
        writer.kv_data[0].pop(key, None)
        writer.add_key_value(key, value, value_type)
    for name, tensor in (tensors or {}).items():
        writer.add_tensor(name, tensor)
    for name, tensor in _weights(checkpoint, architecture, config):
        _add_weight(writer, name, tensor, GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _add_config(writer: GGUFWriter, config: Mapping[str, Any]) -> None:
    for name, method in _SIZES.items():
        if config.get(name) is not None:
            getattr(writer, method)(config[name])
    by_layer_type: Mapping[str, Any] = config["rope_parameters"]
    rope = by_layer_type.get("full_attention", by_layer_type)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(round(config["head_dim"] * rope.get("partial_rotary_factor", 1)))
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    original = rope.get("original_max_position_embeddings", config.get("original_max_position_embeddings"))
    if original is not None:
        writer.add_rope_scaling_orig_ctx_len(original)
    if "attention_factor" in rope:
        writer.add_rope_scaling_attn_factors(rope["attention_factor"])
    for name, tensor in (("long_factor", "rope_factors_long"), ("short_factor", "rope_factors_short")):
        if name in rope:
            writer.add_tensor(f"{tensor}.weight", np.array(rope[name], dtype=np.float32))


def _add_tokenizer(writer: GGUFWriter, checkpoint: Path) -> None:
    parts = json.loads((checkpoint / "tokenizer.json").read_text())
    config = json.loads((checkpoint / "tokenizer_config.json").read_text())
    added = {token["content"]: token["id"] for token in parts["added_tokens"]}
    ids: dict[str, int] = parts["model"]["vocab"] | added
    tokens = sorted(ids, key=ids.__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([TokenType.CONTROL if token in added else TokenType.NORMAL for token in tokens])
    writer.add_token_merges([" ".join(merge) for merge in parts["model"]["merges"]])
    writer.add_eos_token_id(ids[config["eos_token"]])
    if config.get("bos_token") is not None:
        writer.add_bos_token_id(ids[config["bos_token"]])
        writer.add_add_bos_token(True)
    if config.get("chat_template"):
        writer.add_chat_template(config["chat_template"])


def _weights(
    checkpoint: Path, architecture: str, config: Mapping[str, Any]
) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """Yield (name in a GGUF file, values as float32) of a checkpoint's tensors."""
    known = {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(known[architecture], config["num_hidden_layers"])
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for name, tensor in _with_stacked_experts(iter_weights(checkpoint)):
        module, _, part = name.rpartition(".")
        value: NDArray[np.float32] = tensor.to(torch.float32).numpy()
        projection = module.rpartition(".")[2]
        if architecture == "llama" and projection in heads:
            value = _in_pairs(value, heads[projection])
        if architecture.startswith("gemma") and module.endswith("norm"):
            value = value + 1
        yield f"{names.get_name(module)}.{part}", np.ascontiguousarray(value)


def _with_stacked_experts(weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield all weights, but stack a layer's experts in one tensor, [E, ...], whose name has no expert number."""
    experts: defaultdict[str, dict[int, torch.Tensor]] = defaultdict(dict)
    for name, tensor in weights:
        match = _EXPERT.fullmatch(name)
        if match is None:
            yield name, tensor
        else:
            experts[match["before"] + match["after"]][int(match["number"])] = tensor
    for name, numbered in experts.items():
        yield name, torch.stack([numbered[number] for number in sorted(numbered)])


def _in_pairs(rows: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    """Return the rows of each head in llama.cpp's order for the rotary embedding.

    A rotation combines two rows of a head: i and i + D/2 in Hugging Face's format, 2i and 2i + 1 in llama.cpp's.

    Args:
        rows: rows of all heads, [num_heads * D, ...].
        num_heads: number of heads in `rows`.
    """
    halves = rows.reshape(num_heads, 2, -1, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def _add_weight(writer: GGUFWriter, name: str, value: NDArray[np.float32], kind: GGMLQuantizationType) -> None:
    if value.ndim == 1 or kind == GGMLQuantizationType.F32:
        writer.add_tensor(name, value)
    elif kind == GGMLQuantizationType.F16:
        writer.add_tensor(name, value.astype(np.float16))
    else:
        writer.add_tensor(name, gguf.quants.quantize(value, kind), raw_dtype=kind)
