"""The weights of a checkpoint, whatever its form, as plain tensors in the order they lie in."""

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
    """Nobody wants to hear how far reading is."""


def iter_weights(
    path: Path, dtype: torch.dtype | None = None, *, on_read: Callable[[int], None] = _ignore
) -> Iterator[tuple[str, Tensor]]:
    """Find a checkpoint's weights, and return an iterator over (name as Hugging Face has it, tensor).

    A tensor is on the CPU, read, mapped or decoded when it is reached, and need not be kept: no more than one weight is
    in memory at a time. Plain tensors come in the dtype they are stored in.

    Args:
        path: a folder, or a GGUF file.
        dtype: of weights that are decoded from fewer bits; None: float32.
        on_read: hears how many bytes of the files each tensor took.

    Raises:
        CheckpointError: a file is missing, truncated, or not what it says. What concerns which files there are is
            raised by the call, the rest while iterating.
        WeightError: while iterating: the tensors that make up a quantized weight do not fit together.
    """
    if is_gguf(path):
        from graftlm.checkpoint.gguf import iter_gguf_weights

        return iter_gguf_weights(path, dtype, on_read)
    files = SafetensorsFiles(path)
    weight_format = find_weight_format(path)
    if weight_format is None:
        return _plain(files, on_read)
    return _decoded(files, weight_format, dtype, on_read)


def _plain(files: SafetensorsFiles, on_read: Callable[[int], None]) -> Iterator[tuple[str, Tensor]]:
    for name in files:
        tensor = files.read(name)
        yield name, tensor
        on_read(tensor.nbytes)


def _decoded(
    files: SafetensorsFiles, weight_format: WeightFormat, dtype: torch.dtype | None, on_read: Callable[[int], None]
) -> Iterator[tuple[str, Tensor]]:
    """Yield plain tensors as they are, and each quantized weight, decoded, where the first of its tensors lies."""
    import torch

    target = torch.float32 if dtype is None else dtype
    parts_of = _by_module(files.names())
    num_decoded = 0
    for name in files:
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
        "%d quantized weights of the checkpoint (%s) were decoded to %s as they were loaded; they take the memory of "
        "plain ones",
        num_decoded, weight_format.summary, str(target).removeprefix("torch."),
    )  # fmt: skip


def _by_module(names: Set[str]) -> Mapping[str, Set[str]]:
    """Return name without its last part -> the last parts that occur with it."""
    modules: defaultdict[str, set[str]] = defaultdict(set)
    for name in names:
        module, _, part = name.rpartition(".")
        modules[module].add(part)
    return modules
