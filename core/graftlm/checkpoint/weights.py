"""Reads the weights of a checkpoint of any format as plain tensors, in the order of the files."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Set
from pathlib import Path
from typing import TYPE_CHECKING

from graftlm.checkpoint.location import is_gguf
from graftlm.checkpoint.quantized import WeightFormat, WeightParts, find_weight_format
from graftlm.checkpoint.safetensors_files import SafetensorsFiles

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["iter_weights"]

_logger = logging.getLogger(__name__)


def _ignore(num_bytes: int) -> None:
    """Ignore the progress."""


def iter_weights(
    path: Path, dtype: torch.dtype | None = None, *, on_read: Callable[[int], None] = _ignore, prefix: str = ""
) -> Iterator[tuple[str, Tensor]]:
    """Find a checkpoint's weights, and return an iterator over (Hugging Face name, tensor).

    A tensor is on the CPU and is read, mapped or decoded when the iteration reaches it. The iterator keeps no tensor,
    so only one weight is in memory at a time. Plain tensors have the dtype of the file.

    Args:
        path: the checkpoint's folder, or a GGUF file.
        dtype: dtype of weights that are decoded from fewer bits; None: float32.
        on_read: function that is called with the number of bytes of each tensor in the files.
        prefix: prefix of the names of the weights that are read; other weights are skipped.

    Raises:
        CheckpointError: a file is missing, truncated or malformed. The call checks that the files exist; all other
            errors are raised during the iteration.
        WeightError: while iterating: the tensors of a quantized weight do not match.
    """
    if is_gguf(path):
        from graftlm.checkpoint.gguf import iter_gguf_weights

        found = iter_gguf_weights(path, dtype, on_read)
        return ((name, tensor) for name, tensor in found if name.startswith(prefix)) if prefix else found
    files = SafetensorsFiles(path)
    weight_format = find_weight_format(path)
    if weight_format is None:
        return _plain(files, on_read, prefix)
    return _decoded(files, weight_format, dtype, on_read, prefix)


def _plain(files: SafetensorsFiles, on_read: Callable[[int], None], prefix: str) -> Iterator[tuple[str, Tensor]]:
    for name in files:
        if not name.startswith(prefix):
            continue
        tensor = files.read(name)
        yield name, tensor
        on_read(tensor.nbytes)


def _decoded(
    files: SafetensorsFiles,
    weight_format: WeightFormat,
    dtype: torch.dtype | None,
    on_read: Callable[[int], None],
    prefix: str,
) -> Iterator[tuple[str, Tensor]]:
    """Yield plain tensors unchanged, and each quantized weight in decoded form, at the place of its main tensor."""
    import torch

    target = torch.float32 if dtype is None else dtype
    parts_of = _by_module(files.names())
    num_decoded = 0
    for name in files:
        if not name.startswith(prefix):
            continue
        module, _, part = name.rpartition(".")
        main = weight_format.main_part(parts_of.get(module, frozenset()))
        if part == main:
            wanted = parts_of[module] & weight_format.parts
            parts = WeightParts(module, {part: files.read(f"{module}.{part}") for part in wanted})
            yield f"{module}.weight", parts.decoded_by(weight_format, target)
            num_decoded += 1
            on_read(parts.num_bytes)
        elif part not in weight_format.ignored and (main is None or part not in weight_format.parts):
            tensor = files.read(name)
            yield name, tensor
            on_read(tensor.nbytes)
    _logger.info(
        "%d quantized weights of the checkpoint (%s) were decoded to %s while loading; they use as much memory as "
        "plain weights",
        num_decoded, weight_format.summary, str(target).removeprefix("torch."),
    )  # fmt: skip


def _by_module(names: Set[str]) -> Mapping[str, Set[str]]:
    """Return name of a module -> last parts of its tensors' names."""
    modules: defaultdict[str, set[str]] = defaultdict(set)
    for name in names:
        module, _, part = name.rpartition(".")
        modules[module].add(part)
    return modules
