"""Reads tensors by name from the safetensors files of a checkpoint folder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graftlm.checkpoint.json_files import listed, listing, named_file, read_json
from graftlm.errors import CheckpointError
from graftlm.shortening import shortened

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["SafetensorsFiles", "read_tensors"]

_SHOWN_CHARS = 200
_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"


class SafetensorsFiles:
    """Reads the tensors of one file, or of several files with an index, on demand.

    Args:
        folder: folder with model.safetensors, or with model.safetensors.index.json and its files.

    Raises:
        CheckpointError: a file is missing or the index is malformed. A truncated file is detected when it is opened.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._shards = _find_shards(folder)
        self._homes = {name: shard for shard, names in self._shards.items() for name in names}
        self._opened: dict[str, Any] = {}

    def __iter__(self) -> Iterator[str]:
        """Yield the names of all tensors, file by file; each file is opened when the iteration reaches it."""
        for shard in sorted(self._shards):
            yield from self._names_in(shard)
            self._opened.clear()  # each tensor that was read keeps its own memory mapping

    def names(self) -> frozenset[str]:
        """Return the names of all tensors; with an index, the files are not checked."""
        return frozenset(self._homes) if self._homes else frozenset(self._names_in(_WEIGHTS))

    def read(self, name: str) -> Tensor:
        """Return a tensor on the CPU, memory-mapped if possible.

        Args:
            name: a tensor in the files.

        Raises:
            CheckpointError: the tensor's file is truncated, or does not contain the tensor.
        """
        from safetensors import SafetensorError

        shard = self._homes.get(name, _WEIGHTS)
        file = self._open(shard)
        try:
            tensor: Tensor = file.get_tensor(name)
        except SafetensorError as error:
            raise self._lacks(shard, name) from error
        return tensor

    def _names_in(self, shard: str) -> list[str]:
        names = list(self._open(shard).keys())
        absent = sorted(set(self._shards[shard]) - set(names))
        if absent:
            raise self._lacks(shard, absent[0])
        # Tensors that the index does not list are read too, so that the model reports unexpected ones.
        self._homes.update(dict.fromkeys(names, shard))
        return names

    def _open(self, shard: str) -> Any:
        from safetensors import SafetensorError, safe_open

        if shard not in self._opened:
            file = self._folder / shard
            try:
                self._opened[shard] = safe_open(file, framework="pt")
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{file} is truncated or not a safetensors file: {error}") from error
        return self._opened[shard]

    def _lacks(self, shard: str, name: str) -> CheckpointError:
        return CheckpointError(f"{self._folder / shard} lacks the tensor {name!r}, which {_INDEX} lists for it")


def _find_shards(folder: Path) -> dict[str, list[str]]:
    """Return file name -> names of its tensors in the index; check that all files exist."""
    if (folder / _WEIGHTS).is_file():
        return {_WEIGHTS: []}
    if (folder / _INDEX).is_file():
        return _read_index(folder)
    found = listing(folder)
    hint = "; pickled weights (.bin, .pt) are not supported: save the model as safetensors" if ".bin" in found else ""
    raise CheckpointError(f"No weights in {folder}: looked for {_WEIGHTS} and {_INDEX}, found {found}{hint}")


def _read_index(folder: Path) -> dict[str, list[str]]:
    index = folder / _INDEX
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, Mapping) or not weight_map:
        shown = shortened(repr(weight_map), _SHOWN_CHARS)
        raise CheckpointError(f"{index}: weight_map must map tensor names to files, got {shown}")
    shards: dict[str, list[str]] = {}
    for name, shard in weight_map.items():
        named_file(folder, shard, f"{index}: {shortened(repr(name), _SHOWN_CHARS)}")
        shards.setdefault(shard, []).append(name)
    missing = sorted(shard for shard in shards if not (folder / shard).is_file())
    if missing:
        raise CheckpointError(f"{folder} lacks {listed(missing)}, which {_INDEX} lists; found {listing(folder)}")
    return shards


def read_tensors(data: bytes) -> Iterator[tuple[str, Tensor]]:
    """Yield the (name, tensor) pairs of a safetensors file's content.

    Raises:
        CheckpointError: the content is not in the safetensors format.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        tensors = load(data)
    except (SafetensorError, KeyError, ValueError) as error:
        raise CheckpointError(f"the tensors are not in the format of a safetensors file: {error}") from error
    yield from tensors.items()
