"""The layers of which models consist, and the loading of weights into them."""

from graftlm.layers.activation import Activation, activation
from graftlm.layers.attention import Attention
from graftlm.layers.decoder_model import DecoderLayer, DecoderModel
from graftlm.layers.decoder_shape import (
    DecoderShape,
    VocabularyShape,
    read_flag,
    read_layer_types,
    read_number,
    read_size,
)
from graftlm.layers.embedding import TokenEmbedding
from graftlm.layers.gated_norm import GatedRMSNorm
from graftlm.layers.grouped_linear import GroupedLinear, RowGroups
from graftlm.layers.kv_codes import KV_DTYPES, CacheRows, cache_rows, encode_int8
from graftlm.layers.linear import GatedLinear, Linear, pack_linears
from graftlm.layers.mlp import GatedMLP
from graftlm.layers.moe import Experts, GateFunction, MoE, routes_tokens
from graftlm.layers.native_calls import call_native
from graftlm.layers.norm import GemmaQKNorm, GemmaRMSNorm, QKNorm, RMSNorm
from graftlm.layers.ops import LayerOps, UsesOps, bind_ops
from graftlm.layers.recurrent import CausalConv, GatedDeltaRule, RecurrentState, SSDScan, required_state
from graftlm.layers.rope_frequencies import Frequencies, rope_frequencies
from graftlm.layers.rotary import RotaryEmbedding, Rotation, frequency_bytes, rotate
from graftlm.layers.router import ChooseExperts, Router, Routing, read_expert_counts, softmax_top_k
from graftlm.layers.state_ops import StateOps, bind_state_ops
from graftlm.layers.weights import WeightSlot, copy_weights, cuts, empty_parameter, read_weight

__all__ = [
    "KV_DTYPES",
    "Activation",
    "Attention",
    "CacheRows",
    "CausalConv",
    "ChooseExperts",
    "DecoderLayer",
    "DecoderModel",
    "DecoderShape",
    "Experts",
    "Frequencies",
    "GateFunction",
    "GatedDeltaRule",
    "GatedLinear",
    "GatedMLP",
    "GatedRMSNorm",
    "GemmaQKNorm",
    "GemmaRMSNorm",
    "GroupedLinear",
    "LayerOps",
    "Linear",
    "MoE",
    "QKNorm",
    "RMSNorm",
    "RecurrentState",
    "RotaryEmbedding",
    "Rotation",
    "Router",
    "Routing",
    "RowGroups",
    "SSDScan",
    "StateOps",
    "TokenEmbedding",
    "UsesOps",
    "VocabularyShape",
    "WeightSlot",
    "activation",
    "bind_ops",
    "bind_state_ops",
    "cache_rows",
    "call_native",
    "copy_weights",
    "cuts",
    "empty_parameter",
    "encode_int8",
    "frequency_bytes",
    "pack_linears",
    "read_expert_counts",
    "read_flag",
    "read_layer_types",
    "read_number",
    "read_size",
    "read_weight",
    "required_state",
    "rope_frequencies",
    "rotate",
    "routes_tokens",
    "softmax_top_k",
]
