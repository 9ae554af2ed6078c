"""The safetensors files of a checkpoint folder, by the names of their tensors."""

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
    """Reads the tensors of one file, or of several that an index joins, each when it is asked for.

    Args:
        folder: holds model.safetensors, or model.safetensors.index.json and what it names.

    Raises:
        CheckpointError: a file is missing or the index is not one. That a file is truncated shows when it is reached.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._shards = _find_shards(folder)
        self._homes = {name: shard for shard, names in self._shards.items() for name in names}
        self._opened: dict[str, Any] = {}

    def __iter__(self) -> Iterator[str]:
        """Yield the names of all tensors, file by file; a file is opened when it is reached."""
        for shard in sorted(self._shards):
            yield from self._names_in(shard)
            self._opened.clear()  # a tensor that was read keeps the mapping it needs

    def names(self) -> frozenset[str]:
        """Return the names of all tensors; an index is believed."""
        return frozenset(self._homes) if self._homes else frozenset(self._names_in(_WEIGHTS))

    def read(self, name: str) -> Tensor:
        """Return a tensor on the CPU, mapped from its file where the machine can.

        Args:
            name: one of those that the files hold.

        Raises:
            CheckpointError: its file is truncated, or lacks it.
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
        # Names that the index leaves out are read all the same, so that a model can say what it has no place for.
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
        return CheckpointError(f"{self._folder / shard} lacks the tensor {name!r}, which {_INDEX} says it holds")


def _find_shards(folder: Path) -> dict[str, list[str]]:
    """Return file name -> names of tensors that an index expects there, having seen that each file is there."""
    if (folder / _WEIGHTS).is_file():
        return {_WEIGHTS: []}
    if (folder / _INDEX).is_file():
        return _read_index(folder)
    found = listing(folder)
    hint = "; graftlm reads no pickled weights (.bin, .pt): save the model as safetensors" if ".bin" in found else ""
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
        raise CheckpointError(f"{folder} lacks {listed(missing)}, which {_INDEX} names; found {listing(folder)}")
    return shards


def read_tensors(data: bytes) -> Iterator[tuple[str, Tensor]]:
    """Yield the (name, tensor) of the content of a safetensors file.

    Raises:
        CheckpointError: it is none.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        tensors = load(data)
    except (SafetensorError, KeyError, ValueError) as error:
        raise CheckpointError(f"the tensors are not in the format of a safetensors file: {error}") from error
    yield from tensors.items()
