"""Maps llama.cpp's architectures to Hugging Face classes and tensor names."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from graftlm.errors import UnsupportedArchitectureError

__all__ = ["ARCHITECTURES", "MISTRAL", "MIXTRAL", "Architecture", "find_architecture"]

#: Tensors of a layer, without number and last part -> module in a layer.
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GEMMA_LAYER = _LAYER | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_PHI_LAYER = _LAYER | {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}


@dataclass(frozen=True, slots=True)
class Architecture:
    """The mapping of one llama.cpp architecture to a Hugging Face class.

    Attributes:
        class_name: the Hugging Face class.
        model_type: `model_type` in its config.json.
        layer: names of a layer's tensors, see `_LAYER`.
        experts: names of tensors with all experts of a layer; "{}" in a module stands for the expert's index.
        rotates_neighbours: whether the rows of query and key projections are ordered for a rotation of neighbouring
            features.
        norm_offset: number that the converter added to the norms' weights.
    """

    class_name: str
    model_type: str
    layer: Mapping[str, str] = field(default_factory=lambda: _LAYER)
    experts: Mapping[str, str] = field(default_factory=dict)
    rotates_neighbours: bool = False
    norm_offset: float = 0.0


_LLAMA = Architecture("LlamaForCausalLM", "llama", rotates_neighbours=True)
#: Mistral models have the name "llama" in llama.cpp too; their metadata distinguish them.
MISTRAL = Architecture("MistralForCausalLM", "mistral", rotates_neighbours=True)
MIXTRAL = Architecture(
    "MixtralForCausalLM",
    "mixtral",
    layer=_LAYER | {"ffn_gate_inp": "block_sparse_moe.gate"},
    experts={
        "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
        "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
        "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
    },
    rotates_neighbours=True,
)
_QWEN3_MOE = Architecture(
    "Qwen3MoeForCausalLM",
    "qwen3_moe",
    layer=_LAYER | {"ffn_gate_inp": "mlp.gate"},
    experts={
        "ffn_gate_exps": "mlp.experts.{}.gate_proj",
        "ffn_down_exps": "mlp.experts.{}.down_proj",
        "ffn_up_exps": "mlp.experts.{}.up_proj",
    },
)

#: Name in llama.cpp -> architecture.
ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": _LLAMA,
    "qwen2": Architecture("Qwen2ForCausalLM", "qwen2"),
    "qwen3": Architecture("Qwen3ForCausalLM", "qwen3"),
    "qwen3moe": _QWEN3_MOE,
    "gemma2": Architecture("Gemma2ForCausalLM", "gemma2", layer=_GEMMA_LAYER, norm_offset=1.0),
    "gemma3": Architecture("Gemma3ForCausalLM", "gemma3_text", layer=_GEMMA_LAYER, norm_offset=1.0),
    "phi3": Architecture("Phi3ForCausalLM", "phi3", layer=_PHI_LAYER),
}


def find_architecture(name: str, *, has_windows: bool, has_experts: bool) -> Architecture:
    """Return the architecture of a file.

    Args:
        name: the name in llama.cpp.
        has_windows: whether the metadata have a sliding window.
        has_experts: whether the metadata have a number of experts.

    Raises:
        UnsupportedArchitectureError: this architecture is not supported.
    """
    if name not in ARCHITECTURES:
        raise UnsupportedArchitectureError(
            f"The GGUF file's architecture {name!r} is not supported. Supported: {', '.join(ARCHITECTURES)}. Use the "
            f"model's safetensors checkpoint"
        )
    if name == "llama" and has_experts:
        return MIXTRAL
    return MISTRAL if name == "llama" and has_windows else ARCHITECTURES[name]
