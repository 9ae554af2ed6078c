"""Whether the configurations of two checkpoints mean one model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from graftlm.checkpoint.location import is_gguf
from graftlm.contracts import ModelConfig
from graftlm.errors import CheckpointError

__all__ = ["check_same_model"]

#: Entries that change nothing in what a model computes from its weights: names, and what only training reads.
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
    """Refuse a checkpoint whose configuration means another model than the one that is served.

    An entry that is absent means what Transformers' configuration of that model type has by default, and ropes may be
    written in its old way or its new one. A GGUF file names the entries that its architecture reads, and its own ends
    of an answer: beside one, only entries that both name are compared.

    Args:
        own, own_path: of the model that is served.
        other, path: of the checkpoint that is to take its place.

    Raises:
        CheckpointError: it names the first entry that differs.
    """
    if _compared(own.raw) == _compared(other.raw):
        return  # as of two steps of one training: there is no need to ask Transformers
    before, after = _meaning(own.raw), _meaning(other.raw)
    name = _first_difference(before, after, has_gguf=is_gguf(own_path) or is_gguf(path))
    if name is not None:
        file = path if is_gguf(path) else path / "config.json"
        raise CheckpointError(
            f"{file} is of another model than the one that is served: {name} is "
            f"{after.get(name)!r} there and {before.get(name)!r} here. Start an engine with it instead"
        )


def _first_difference(before: Mapping[str, Any], after: Mapping[str, Any], *, has_gguf: bool) -> str | None:
    names = (before.keys() & after.keys()) - {_EOS} if has_gguf else before.keys() | after.keys()
    return next((name for name in sorted(names) if before.get(name) != after.get(name)), None)


def _meaning(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries with the defaults of those that are absent, where Transformers knows the model type."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import CONFIG_MAPPING

    try:
        known = CONFIG_MAPPING[raw["model_type"]].from_dict(dict(raw))
    except (StrictDataclassError, KeyError, TypeError, ValueError):
        return _compared(raw)  # the engine may read what Transformers does not: it is compared as it is written
    return _compared(known.to_dict())


def _compared(raw: Mapping[str, Any]) -> dict[str, Any]:
    entries = {name: value for name, value in raw.items() if name not in _FREE_ENTRIES}
    if isinstance(entries.get(_EOS), int):
        entries[_EOS] = [entries[_EOS]]
    return entries
