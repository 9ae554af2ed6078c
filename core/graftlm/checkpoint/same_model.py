"""Checks whether the configurations of two checkpoints describe the same model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from graftlm.checkpoint.location import is_gguf
from graftlm.contracts import ModelConfig
from graftlm.errors import CheckpointError

__all__ = ["check_same_model"]

#: Entries that do not affect the forward pass: names, and entries for training.
_FREE_ENTRIES: Final = frozenset(
    {
        "_name_or_path",
        "attention_dropout",
        "attn_pdrop",
        "bos_token_id",
        "dtype",
        "embd_pdrop",
        "hidden_dropout",
        "id2label",
        "initializer_range",
        "label2id",
        "output_router_logits",
        "pad_token_id",
        "pretraining_tp",
        "resid_pdrop",
        "router_aux_loss_coef",
        "router_jitter_noise",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    }
)
_EOS: Final = "eos_token_id"


def check_same_model(own: ModelConfig, own_path: Path, other: ModelConfig, path: Path) -> None:
    """Refuse a checkpoint whose configuration describes another model than the served one.

    Missing entries have the defaults of Transformers' configuration of that model type. RoPE entries may be in the old
    or the new format. A GGUF file has only the entries of its architecture, and its own end-of-sequence tokens.
    Therefore, if one checkpoint is a GGUF file, only entries that both configurations have are compared.

    Args:
        own, own_path: configuration and path of the served model.
        other, path: configuration and path of the checkpoint that is to replace the served one.

    Raises:
        CheckpointError: the models differ; the message has the first different entry.
    """
    if _compared(own.raw) == _compared(other.raw):
        return  # the usual case, two checkpoints of one training, does not need Transformers
    before, after = _meaning(own.raw), _meaning(other.raw)
    name = _first_difference(before, after, has_gguf=is_gguf(own_path) or is_gguf(path))
    if name is not None:
        file = path if is_gguf(path) else path / "config.json"
        raise CheckpointError(
            f"{file} is not of the served model: {name} is {after.get(name)!r}, expected {before.get(name)!r}. Start "
            f"an engine with this checkpoint instead"
        )


def _first_difference(before: Mapping[str, Any], after: Mapping[str, Any], *, has_gguf: bool) -> str | None:
    names = (before.keys() & after.keys()) - {_EOS} if has_gguf else before.keys() | after.keys()
    return next((name for name in sorted(names) if before.get(name) != after.get(name)), None)


def _meaning(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries; missing entries have Transformers' defaults, if Transformers supports the model type."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import CONFIG_MAPPING

    try:
        known = CONFIG_MAPPING[raw["model_type"]].from_dict(dict(raw))
    except (StrictDataclassError, KeyError, TypeError, ValueError):
        return _compared(raw)  # the engine may support models that Transformers does not: compare the raw entries
    return _compared(known.to_dict())


def _compared(raw: Mapping[str, Any]) -> dict[str, Any]:
    entries = {name: value for name, value in raw.items() if name not in _FREE_ENTRIES}
    if isinstance(entries.get(_EOS), int):
        entries[_EOS] = [entries[_EOS]]
    return entries
