"""Separates the text model of a checkpoint with pictures from its tower: configuration and names of weights."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from graftlm.errors import CheckpointError, UnsupportedArchitectureError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["text_config", "text_name", "text_weights", "tower_weights"]

#: Model type of a text model -> class name, where it differs from that of a text checkpoint of this type.
_ARCHITECTURES: Final[Mapping[str, str]] = {
    "qwen2_vl_text": "Qwen2ForCausalLM",
    "qwen2_5_vl_text": "Qwen2ForCausalLM",
    "qwen3_vl_text": "Qwen3ForCausalLM",
}

#: Patterns of the names of the text model's weights, and their names in a checkpoint without a tower.
_NAMES: Final = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"^(?:model\.)?language_model\.lm_head\.(.+)$", r"lm_head.\1"),
        (r"^(?:model\.)?language_model\.(?:model\.)?((?:layers|norm|embed_tokens)\..+)$", r"model.\1"),
        (r"^model\.text_model\.((?:layers|norm|embed_tokens)\..+)$", r"model.\1"),
        (r"^((?:model\.(?:layers|norm|embed_tokens)|lm_head)\..+)$", r"\1"),
    )
)


def text_name(name: str) -> str | None:
    """Return the name of a text model's weight in a checkpoint without a tower; None for a weight of the tower."""
    for pattern, replacement in _NAMES:
        if pattern.match(name):
            return pattern.sub(replacement, name)
    return None


def text_weights(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights of the text model, with their names in a checkpoint without a tower."""
    for name, tensor in weights:
        renamed = text_name(name)
        if renamed is not None:
            yield renamed, tensor


def tower_weights(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights that do not belong to the text model."""
    return ((name, tensor) for name, tensor in weights if text_name(name) is None)


def text_config(raw: Mapping[str, Any], file: object) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Return the class names and the configuration of the text model of a checkpoint with a tower.

    A checkpoint stores only those entries of `text_config` that differ from the defaults of Transformers' class.

    Raises:
        CheckpointError: the entries are not valid.
        UnsupportedArchitectureError: Transformers does not know the model types.
    """
    from transformers import CONFIG_MAPPING, AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CLASSES

    kind, entries = raw.get("model_type"), raw
    if kind not in CONFIG_MAPPING:  # a plugin's own class, whose text model Transformers may know
        stated = raw.get("text_config")
        entries = stated if isinstance(stated, Mapping) else {}
        kind = entries.get("model_type")
    if kind not in CONFIG_MAPPING:
        raise UnsupportedArchitectureError(f"{file}: the model type {kind!r} is unknown to Transformers")
    try:
        whole = AutoConfig.for_model(kind, **{key: value for key, value in entries.items() if key != "model_type"})
    except Exception as error:  # the configuration's class may raise any exception for its entries
        raise CheckpointError(f"{file}: Transformers refuses the configuration: {str(error)[:300]}") from error
    found = whole.get_text_config()
    text: dict[str, Any] = found.to_dict()
    name = _ARCHITECTURES.get(found.model_type) or CLASSES.get(found.model_type)
    if name is None or isinstance(name, tuple | list):
        raise UnsupportedArchitectureError(f"{file}: there is no text model of type {found.model_type!r}")
    dtype = raw.get("dtype") or raw.get("torch_dtype") or text.get("dtype")
    text |= {"architectures": [name], "tie_word_embeddings": bool(whole.tie_word_embeddings), "dtype": dtype}
    return (name,), text
