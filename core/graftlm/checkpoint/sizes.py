"""Checks that a checkpoint's files are large enough for the sizes in config.json, before a model is created."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graftlm.checkpoint.location import checkpoint_files, is_gguf
from graftlm.checkpoint.safetensors_files import SafetensorsFiles
from graftlm.errors import CheckpointError

if TYPE_CHECKING:
    from graftlm.contracts import ModelConfig

__all__ = ["check_sizes"]

#: Names of the number of layers, of draft layers, and of the hidden size in the configurations of various
#: architectures.
_LAYER_ENTRIES = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_nextn_predict_layers")
_HIDDEN_ENTRIES = ("hidden_size", "n_embd", "d_model")
#: Names of entries with the number of rows of a weight; a row has about the size of the hidden states.
_ROW_ENTRIES = (
    "vocab_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "num_local_experts",
    "num_experts",
    "n_routed_experts",
    "n_shared_experts",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "kv_lora_rank",
    "q_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "num_labels",
)
#: Maximum number of weights per byte in any format.
_WEIGHTS_PER_BYTE = 8


def check_sizes(config: ModelConfig, path: Path) -> None:
    """Refuse sizes with which the model would be far larger than the checkpoint.

    Only limits are checked, because loading the weights checks their shapes. Entries that are not integers are ignored.

    Args:
        config: the checkpoint's configuration.
        path: the checkpoint's folder, or a GGUF file.

    Raises:
        CheckpointError: there are more layers than tensors, a weight would be larger than all files, or a file is
            missing or malformed.
    """
    num_tensors = _num_tensors(path)
    for entry, layers in _whole_numbers(config.raw, _LAYER_ENTRIES):
        if layers > num_tensors:
            raise _too_large(f"{entry} {layers}", f"are {num_tensors} tensors, fewer than one per layer")
    num_bytes = sum(file.stat().st_size for file in checkpoint_files(path))
    for hidden_entry, hidden_size in _whole_numbers(config.raw, _HIDDEN_ENTRIES):
        for entry, rows in _whole_numbers(config.raw, _ROW_ENTRIES):
            if rows * hidden_size > num_bytes * _WEIGHTS_PER_BYTE:
                raise _too_large(
                    f"{entry} {rows} and {hidden_entry} {hidden_size}",
                    f"have {num_bytes} bytes, too few for a matrix of these sizes",
                )


def _num_tensors(path: Path) -> int:
    if is_gguf(path):
        from graftlm.checkpoint.gguf.file import GGUFFile

        return sum(1 for _ in GGUFFile(path))
    return len(SafetensorsFiles(path).names())


def _whole_numbers(raw: Mapping[str, Any], entries: tuple[str, ...]) -> Iterator[tuple[str, int]]:
    """Yield the entries that are integers."""
    for entry in entries:
        value = raw.get(entry)
        if isinstance(value, int) and not isinstance(value, bool):
            yield entry, value


def _too_large(said: str, found: str) -> CheckpointError:
    return CheckpointError(
        f"config.json has {said}, but the weights {found}. Use config.json and weights of the same checkpoint"
    )
