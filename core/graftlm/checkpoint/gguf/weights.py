"""Converts the tensors of a GGUF file to those of a Hugging Face checkpoint: names, order of rows, offsets."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from graftlm.checkpoint.gguf.architecture import Architecture
from graftlm.checkpoint.gguf.config import architecture_of
from graftlm.checkpoint.gguf.file import GGUFFile
from graftlm.errors import WeightError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["iter_gguf_weights"]

_logger = logging.getLogger(__name__)

_IN_LAYER = re.compile(r"blk\.(?P<layer>\d+)\.(?P<module>\w+)\.(?P<part>weight|bias)")
_OUTSIDE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
#: Tensors that are read for the configuration, or that graftlm computes.
_NO_WEIGHTS = re.compile(r"rope_freqs\.weight|rope_factors_(long|short)\.weight|blk\.\d+\.attn_rot_embd\.weight")
_PLAIN_TYPES = ("F32", "F16", "BF16")


def iter_gguf_weights(
    path: Path, dtype: torch.dtype | None, on_read: Callable[[int], None]
) -> Iterator[tuple[str, Tensor]]:
    """Open a GGUF file, and return an iterator over (Hugging Face name, tensor).

    A tensor without a Hugging Face name keeps its own name, so that the model reports it as unexpected.

    Args:
        path: the file, or the first of several parts.
        dtype: dtype of decoded quantized tensors; None: float32.
        on_read: function that is called with the number of bytes of each tensor in the file.

    Raises:
        CheckpointError: the file is malformed, or an entry or the package `gguf` is missing.
        UnsupportedArchitectureError: this architecture is not supported.
        WeightError: while iterating: a tensor's storage type cannot be decoded.
    """
    file = GGUFFile(path)
    return _iterate(file, _Renaming(file, architecture_of(file)), dtype, on_read)


def _iterate(
    file: GGUFFile, renaming: _Renaming, dtype: torch.dtype | None, on_read: Callable[[int], None]
) -> Iterator[tuple[str, Tensor]]:
    import torch

    target = torch.float32 if dtype is None else dtype
    kinds: Counter[str] = Counter()
    for name in file:
        if not _NO_WEIGHTS.fullmatch(name):
            yield from renaming.tensors(name, file.read(name, target))
            kinds[file.type_name(name)] += 1
        on_read(file.num_bytes(name))
    decoded = [f"{count} {kind}" for kind, count in sorted(kinds.items()) if kind not in _PLAIN_TYPES]
    if decoded:
        _logger.info(
            "quantized tensors of the GGUF file (%s) were decoded to %s while loading; they use as much memory as "
            "plain tensors",
            ", ".join(decoded), str(target).removeprefix("torch."),
        )  # fmt: skip


class _Renaming:
    """Reverts the changes of llama.cpp's converter to names and values.

    Args:
        file: the file of the tensors.
        architecture: architecture of the file.
    """

    def __init__(self, file: GGUFFile, architecture: Architecture) -> None:
        self._architecture = architecture
        num_heads = file.size("{arch}.attention.head_count")
        self._heads = {"attn_q": num_heads, "attn_k": file.size("{arch}.attention.head_count_kv", num_heads)}

    def tensors(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield the Hugging Face tensors of a tensor in the file: one tensor, or one per expert."""
        match = _IN_LAYER.fullmatch(name)
        if match is None:
            yield _OUTSIDE.get(name, name), self._without_offset(name, tensor)
            return
        module, prefix, part = match["module"], f"model.layers.{match['layer']}", match["part"]
        if module in self._architecture.experts:
            template = self._architecture.experts[module]
            for i, expert in enumerate(tensor):
                yield f"{prefix}.{template.format(i)}.{part}", expert
        elif module in self._architecture.layer:
            value = self._without_offset(name, self._by_halves(name, module, tensor))
            yield f"{prefix}.{self._architecture.layer[module]}.{part}", value
        else:
            yield name, tensor

    def _by_halves(self, name: str, module: str, tensor: Tensor) -> Tensor:
        """Return query and key projections with rows in the order for a rotation of the halves of a head.

        If the architecture rotates neighbours, the rows of a head are (x0, y0, x1, y1, ...) in the file and
        (x0, x1, ..., y0, y1, ...) in Hugging Face's checkpoint.
        """
        if not self._architecture.rotates_neighbours or module not in self._heads:
            return tensor
        num_heads = self._heads[module]
        if tensor.shape[0] % (2 * num_heads):
            raise WeightError(
                f"The tensor {name!r} has shape {list(tensor.shape)}, whose rows cannot be split into {num_heads} heads"
            )
        rows = tensor.reshape(num_heads, -1, 2, *tensor.shape[1:])  # [heads, D / 2, 2, ...]
        return rows.transpose(1, 2).reshape(tensor.shape)

    def _without_offset(self, name: str, tensor: Tensor) -> Tensor:
        is_norm = name.endswith("norm.weight")
        return tensor - self._architecture.norm_offset if is_norm and self._architecture.norm_offset else tensor
