"""Writes small random checkpoints of real architectures in the format of Hugging Face."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn

__all__ = ["END_OF_TURN", "Family", "write_random_checkpoint", "write_tiny_checkpoint"]

Family: TypeAlias = Literal[
    "llama",
    "mistral",
    "ministral",
    "mixtral",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
    "gemma2",
    "gemma3_text",
    "phi3",
    "deepseek_v2",
    "deepseek_v3",
    "gpt_oss",
    "lfm2",
    "mamba2",
    "granitemoehybrid",
    "qwen3_next",
    "qwen3_5_text",
]

#: Entries of `_FAMILY_CONFIG` that both DeepSeek versions have.
_DEEPSEEK_CONFIG: dict[str, Any] = {
    "num_key_value_heads": None,
    "kv_lora_rank": 32,
    "q_lora_rank": None,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 24,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 24,
    "n_routed_experts": 4,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
}

#: Entries of `_FAMILY_CONFIG` of models with gated delta networks.
_DELTA_CONFIG: dict[str, Any] = {
    "full_attention_interval": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}

#: Family -> entries of its configuration. The usual defaults are for large models; with the defaults, some features
#: would have no effect in a small model.
_FAMILY_CONFIG: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 16},
    "ministral": {"sliding_window": 16},
    "mixtral": {"num_local_experts": 3, "num_experts_per_tok": 2},
    "qwen2_moe": {
        "num_experts": 3,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "shared_expert_intermediate_size": 32,
    },
    "qwen3_moe": {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True},
    "phi3": {"pad_token_id": None},
    "gemma2": {
        "sliding_window": 16,
        "query_pre_attn_scalar": 24,
        "attn_logit_softcapping": 8.0,
        "final_logit_softcapping": 6.0,
    },
    "gemma3_text": {"sliding_window": 16, "query_pre_attn_scalar": 24},
    "deepseek_v2": _DEEPSEEK_CONFIG,
    "deepseek_v3": {**_DEEPSEEK_CONFIG, "q_lora_rank": 40, "n_routed_experts": 8, "n_group": 4, "topk_group": 2},
    "lfm2": {"full_attn_idxs": [1], "block_auto_adjust_ff_dim": False, "conv_bias": True},
    "mamba2": {
        "num_heads": 8,
        "head_dim": 16,
        "state_size": 16,
        "n_groups": 2,
        "num_attention_heads": None,
        "intermediate_size": None,
    },
    "granitemoehybrid": {
        "mamba_n_heads": 8,
        "mamba_d_state": 16,
        "mamba_n_groups": 2,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 48,
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.2,
        "residual_multiplier": 0.7,
        "logits_scaling": 2.0,
    },
    "qwen3_next": {
        **_DELTA_CONFIG,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
    },
    "qwen3_5_text": _DELTA_CONFIG,
    "gpt_oss": {"sliding_window": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "swiglu_limit": 2.0},
}

#: End-of-sequence token of the tiny tokenizer, with id 0.
END_OF_TURN = "<|end|>"

_SPECIAL_TOKENS = (END_OF_TURN, "<|pad|>", "<|system|>", "<|user|>", "<|assistant|>")

_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

_TEXT = (
    "A small river runs past the mill, and every morning the miller counts the sacks of flour.",
    'Numbers such as 0, 1, 2, 10, 128 and 3.14 stand next to words; {"name": "Ada", "age": 36} is a record.',
    "Where does the river end? It ends in the sea, says the child, and the sea ends in the sky.",
    "Ein kleiner Fluss, une petite rivière, un río pequeño, 小さな川.",
)


def write_tiny_checkpoint(
    directory: Path,
    family: Family = "llama",
    seed: int = 0,
    *,
    hidden_size: int = 64,
    intermediate_size: int = 96,
    num_layers: int = 2,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 16,
    vocab_size: int = 320,
    max_position_embeddings: int = 256,
    tie_word_embeddings: bool = False,
    rope_parameters: Mapping[str, Any] | None = None,
    eos_token_id: int | None = None,
    shards: int = 1,
    dtype: torch.dtype = torch.float32,
    initializer_range: float = 0.3,
    tokenizer: bool = False,
    num_labels: int | None = None,
    config: Mapping[str, Any] | None = None,
) -> Path:
    """Write config.json, generation_config.json, safetensors files, and optionally tokenizer files.

    The random weights, including norms and biases, have a large standard deviation. One token is therefore clearly more
    likely than all others, and an error in any layer changes the output.

    Args:
        directory: folder of the checkpoint. It is created if necessary, and its files are replaced.
        family: the architecture. Sliding windows have 16 tokens unless `config` has another value.
        seed: seed of the weights. Equal arguments give equal files.
        hidden_size: size of hidden states; Hugging Face requires a multiple of num_heads for Llama.
        intermediate_size: size of the feed-forward layer.
        num_layers: number of decoder layers.
        num_heads: number of query heads.
        num_kv_heads: number of key/value heads, a divisor of num_heads.
        head_dim: size of a head; even, and independent of hidden_size / num_heads.
        vocab_size: number of rows of the embedding.
        max_position_embeddings: longest context in tokens.
        tie_word_embeddings: whether the embedding is also the output projection.
        rope_parameters: for example {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}; None: the default
            type.
        eos_token_id: token that ends an answer; None: the tokenizer's end token, or no token if there is no tokenizer.
        shards: number of safetensors files; for more than one file, an index is also written.
        dtype: dtype of the tensors.
        initializer_range: standard deviation of all weights.
        tokenizer: whether to write a byte-level tokenizer with a chat template.
        num_labels: number of labels of a classification head, which replaces the output projection; None: the model
            generates text.
        config: other entries of the Hugging Face configuration class.

    Returns:
        `directory`.

    Raises:
        ValueError: the vocabulary is too small for the tokenizer.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

    eos = 0 if eos_token_id is None and tokenizer else eos_token_id
    entries: dict[str, Any] = {
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "vocab_size": vocab_size,
        "max_position_embeddings": max_position_embeddings,
        "tie_word_embeddings": tie_word_embeddings,
        "rope_parameters": dict(rope_parameters) if rope_parameters else None,
        "bos_token_id": None,
        "eos_token_id": eos,
        **({} if num_labels is None else {"num_labels": num_labels}),
    }
    if family == "granitemoehybrid":
        entries["layer_types"] = ["full_attention" if i == 1 else "linear_attention" for i in range(num_layers)]
    hf_config = AutoConfig.for_model(family, **{**entries, **_FAMILY_CONFIG.get(family, {}), **(config or {})})
    with torch.random.fork_rng(devices=[]):  # the constructor draws random weights, which are replaced below
        kind = AutoModelForCausalLM if num_labels is None else AutoModelForSequenceClassification
        model = kind.from_config(hf_config, dtype=dtype)
    adds_one = family.startswith(("gemma", "qwen3_next", "qwen3_5"))  # norms multiply by the weight plus 1
    draw_weights(model, seed, initializer_range, norm_mean=0 if adds_one else 1)
    directory.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(directory)
    if shards > 1:
        _split_weights(directory, shards)
    if tokenizer:
        write_tokenizer(directory, vocab_size, max_position_embeddings)
    return directory


def write_random_checkpoint(
    directory: Path,
    model_type: str,
    config: Mapping[str, Any],
    seed: int = 0,
    *,
    initializer_range: float = 0.2,
    tokenizer: bool = False,
) -> str:
    """Write a random float32 checkpoint of any language model that Transformers supports.

    Args:
        directory: folder of the checkpoint. It is created if necessary, and its files are replaced.
        model_type: `model_type` of config.json.
        config: entries of the configuration class.
        seed: seed of the weights.
        initializer_range: standard deviation of all weights.
        tokenizer: whether to write a byte-level tokenizer; `config` must then have vocab_size and
            max_position_embeddings.

    Returns:
        The name of the model's class, as in `architectures` of config.json.

    Raises:
        ValueError: Transformers has no such model type, or the vocabulary is too small for the tokenizer.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.random.fork_rng(devices=[]):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **config), dtype=torch.float32)
    draw_weights(model, seed, initializer_range, norm_mean=1)
    directory.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(directory)
    if tokenizer:
        write_tokenizer(directory, config["vocab_size"], config["max_position_embeddings"])
    return type(model).__name__


def draw_weights(model: nn.Module, seed: int, initializer_range: float, norm_mean: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator) * initializer_range
            parameter.copy_(norm_mean + noise if "norm" in name else noise)
        saved = model.state_dict().keys()
        for name, buffer in model.named_buffers():
            if name in saved:
                buffer.copy_(torch.randn(buffer.shape, generator=generator) * initializer_range)


def _split_weights(directory: Path, shards: int) -> None:
    """Distribute the tensors of model.safetensors over several files, and write an index."""
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    weight_map: dict[str, str] = {}
    for i in range(shards):
        file = f"model-{i + 1:05}-of-{shards:05}.safetensors"
        names = sorted(tensors)[i::shards]
        save_file({name: tensors[name] for name in names}, directory / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(names, file))
    total_bytes = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2), encoding="utf-8")


def write_tokenizer(directory: Path, vocab_size: int, max_len: int) -> None:
    from transformers import PreTrainedTokenizerFast

    alphabet = pre_tokenizers.ByteLevel.alphabet()
    smallest = len(alphabet) + len(_SPECIAL_TOKENS)
    if vocab_size < smallest:
        raise ValueError(f"A byte-level tokenizer needs a vocab_size of at least {smallest}, got {vocab_size}")
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=list(_SPECIAL_TOKENS), initial_alphabet=alphabet, show_progress=False
    )
    core.train_from_iterator(_TEXT, trainer)
    PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token=END_OF_TURN,
        pad_token="<|pad|>",
        additional_special_tokens=list(_SPECIAL_TOKENS[2:]),
        chat_template=_CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=max_len,
    ).save_pretrained(directory)
