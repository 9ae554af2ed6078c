"""Reads the configuration of an EAGLE-3 head, which is published in two forms."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from graftlm.contracts import ModelConfig
from graftlm.errors import CheckpointError, UnsupportedArchitectureError

__all__ = ["Eagle3Config", "read_eagle3_config"]

#: Name of the only layer in the tensor names of each form.
_PLAIN_LAYER: Final = "midlayer."
_SPECULATORS_LAYER: Final = "layers.0."
#: Features of some published heads that would change the computation.
_UNSUPPORTED: Final = ("norm_before_fc", "fc_norm", "norm_output")


@dataclass(frozen=True, slots=True)
class Eagle3Config:
    """The sizes of a head.

    Attributes:
        model: sizes of the head's layer, in the form of a model's configuration; `vocab_size` is the served model's.
        served_size: size of the served model's hidden states.
        draft_vocab_size: number of tokens that the head can draft.
        hidden_layers: layers of the served model whose inputs the head reads.
        norms_residual: whether the residual stream starts with the normalised feature instead of the feature.
        layer_name: prefix of the names of the layer's tensors.
    """

    model: ModelConfig
    served_size: int
    draft_vocab_size: int
    hidden_layers: tuple[int, ...]
    norms_residual: bool
    layer_name: str


def read_eagle3_config(
    raw: Mapping[str, Any], num_layers: int, hidden_layers: Sequence[int] | None = None
) -> Eagle3Config:
    """Read the config.json of a head.

    Args:
        raw: content of config.json. With `speculators_model_type`, it has the form of the library `speculators`;
            otherwise, that of the class LlamaForCausalLMEagle3.
        num_layers: L, number of layers of the served model.
        hidden_layers: layers of the served model whose inputs the head reads; None: those in config.json, or else
            2, L // 2 and L - 3.

    Raises:
        CheckpointError: an entry is missing or wrong.
        UnsupportedArchitectureError: the head is not an EAGLE-3 head of one Llama layer.
    """
    kind = raw.get("speculators_model_type")
    layer = raw if kind is None else raw.get("transformer_layer_config")
    if kind not in (None, "eagle3") or (kind is None and not _is_eagle3(raw)):
        raise UnsupportedArchitectureError(
            f"config.json has architectures {raw.get('architectures')!r} and speculators_model_type {kind!r}; expected "
            "LlamaForCausalLMEagle3, or speculators_model_type eagle3"
        )
    if not isinstance(layer, Mapping):
        raise CheckpointError(f"config.json needs transformer_layer_config as an object, got {layer!r}")
    _check_supported(raw, layer)
    vocab_size = _size(layer, "vocab_size")
    model = ModelConfig(
        ("LlamaForCausalLMEagle3",), vocab_size, _size(layer, "max_position_embeddings", 2048), (), {**layer}
    )
    served_size = raw.get("target_hidden_size")
    return Eagle3Config(
        model=model,
        served_size=_size(layer, "hidden_size") if served_size is None else _size(raw, "target_hidden_size"),
        draft_vocab_size=_size(raw, "draft_vocab_size", vocab_size),
        hidden_layers=_hidden_layers(raw, num_layers, hidden_layers),
        norms_residual=bool(raw.get("norm_before_residual", kind is not None)),
        layer_name=_PLAIN_LAYER if kind is None else _SPECULATORS_LAYER,
    )


def _is_eagle3(raw: Mapping[str, Any]) -> bool:
    names = raw.get("architectures")
    return isinstance(names, Sequence) and "LlamaForCausalLMEagle3" in names


def _check_supported(raw: Mapping[str, Any], layer: Mapping[str, Any]) -> None:
    """Refuse heads with more than one layer, with another kind of layer, or with additional norms."""
    eagle = raw.get("eagle_config")
    eagle = eagle if isinstance(eagle, Mapping) else {}
    reasons = [f"{name} true" for name in _UNSUPPORTED if raw.get(name) or eagle.get(name)]
    if layer.get("model_type", "llama") != "llama":
        reasons.append(f"model_type {layer['model_type']!r}")
    if layer.get("num_hidden_layers", 1) != 1:
        reasons.append(f"num_hidden_layers {layer['num_hidden_layers']!r}")
    if eagle.get("use_aux_hidden_state") is False:
        reasons.append("use_aux_hidden_state false")
    if reasons:
        raise UnsupportedArchitectureError(
            f"config.json has {', '.join(reasons)}; only EAGLE-3 heads of one Llama layer are supported"
        )


def _hidden_layers(raw: Mapping[str, Any], num_layers: int, configured: Sequence[int] | None) -> tuple[int, ...]:
    """Return the layers whose inputs are read, in the order of their parts of the head's input."""
    name = "eagle_aux_hidden_state_layer_ids"
    eagle = raw.get("eagle_config")
    inner = eagle.get(name) if isinstance(eagle, Mapping) else None
    layers = configured or raw.get(name) or inner or (2, num_layers // 2, num_layers - 3)
    if not isinstance(layers, Sequence) or any(
        isinstance(i, bool) or not isinstance(i, int) or not 0 <= i <= num_layers for i in layers
    ):
        raise CheckpointError(
            f"the head reads the inputs of layers {layers!r}, but the served model has {num_layers} layers; set the "
            "option hidden_layers"
        )
    return tuple(layers)


def _size(raw: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = raw.get(name)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise CheckpointError(f"config.json needs {name} as a whole number above 0, got {value!r}")
    return value
