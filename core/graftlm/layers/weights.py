"""Copies a checkpoint's tensors to parameters; missing and surplus tensors are errors.

A layer declares by `WeightSlot`s where each checkpoint tensor belongs. A slot's target may be some rows of a larger
parameter: projections that are separate in a checkpoint become one matrix. If several ranks split a dimension, a slot's
target is the rank's part of it, and only this part of the tensor is read.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

import torch
from torch import Tensor, nn

from graftlm.contracts import Shard
from graftlm.errors import RequestError, WeightError

__all__ = ["WeightSlot", "copy_weights", "cuts", "empty_parameter", "part_of", "read_weight"]

#: Suffixes of the names of tensors that are ignored: old checkpoints contain them, but graftlm computes them.
IGNORED_SUFFIXES = ("rotary_emb.inv_freq",)

#: Prefix of the names in a language model's checkpoint. In a checkpoint without an output projection, the names lack
#: this prefix.
_BASE_PREFIX = "model."

_NAMES_SHOWN = 5


@dataclass(frozen=True, slots=True)
class WeightSlot:
    """The place of one checkpoint tensor.

    Attributes:
        name: the tensor's name in the checkpoint.
        target: the target of the copy: a parameter, or some of its rows.
        per_row: whether the tensor is one row, which is copied to each row of the target.
        offset: number that is added to the tensor, in the target's dtype.
        shards: (dimension of the tensor, the rank's part of it), for each dimension that ranks split.
    """

    name: str
    target: Tensor
    per_row: bool = False
    offset: float = 0.0
    shards: tuple[tuple[int, Shard], ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape that the checkpoint's tensor must have."""
        shape = list(self.target.shape[1:] if self.per_row else self.target.shape)
        for dim, shard in self.shards:
            shape[dim] = shard.size
        return tuple(shape)

    def part_of(self, tensor: Tensor) -> Tensor:
        """Return the rank's part of a checkpoint's tensor: a view if the part is one interval."""
        for dim, shard in self.shards:
            tensor = part_of(tensor, dim, shard)
        return tensor


def cuts(*dims: Shard | None) -> tuple[tuple[int, Shard], ...]:
    """Return `WeightSlot.shards` for the first dimensions of a tensor; None for a dimension that is not split."""
    return tuple((dim, shard) for dim, shard in enumerate(dims) if shard is not None and not shard.is_whole)


def part_of(tensor: Tensor, dim: int, shard: Shard) -> Tensor:
    """Return the rank's part of a dimension: a view if the part is one interval."""
    pieces = [tensor.narrow(dim, start, stop - start) for start, stop, _ in shard.pieces]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)


def empty_parameter(*shape: int, device: torch.device, dtype: torch.dtype) -> nn.Parameter:
    """Return an uninitialised parameter for inference."""
    return nn.Parameter(torch.empty(shape, device=device, dtype=dtype), requires_grad=False)


def copy_weights(
    slots: Iterable[WeightSlot],
    weights: Iterable[tuple[str, Tensor]],
    aliases: Mapping[str, str] | None = None,
    *,
    partial: bool = False,
) -> None:
    """Fill every slot from a checkpoint.

    Names may lack the prefix "model.", as in checkpoints of a family's base class. For slots on the meta device,
    tensors are checked and not copied.

    Args:
        slots: all slots of the model; names are unique.
        weights: (name, tensor) of the whole checkpoint; each tensor is released before the next is read.
        aliases: second name -> slot's name, for tied weights. One of the two tensors is enough; if the checkpoint has
            both, they must be equal.
        partial: whether slots without a tensor keep their content; False: a missing tensor is an error.

    Effects: copies to the slots' targets, with conversion to their dtype and device.

    Raises:
        WeightError: a tensor is missing, surplus, given twice, of the wrong shape or not of a floating dtype.
    """
    by_name = {slot.name: slot for slot in slots}
    aliases = aliases or {}
    seen: set[str] = set()
    filled: dict[str, Tensor | None] = {}  # name -> first tensor if tied and on meta, else None
    surplus: list[str] = []
    for name, tensor in weights:
        if name in seen:
            raise WeightError(f"The checkpoint contains {name!r} twice")
        seen.add(name)
        slot = by_name.get(aliases.get(name, name)) or by_name.get(f"{_BASE_PREFIX}{name}")
        if slot is not None:
            _check(slot, name, tensor)
            if slot.name in filled:
                _check_tie(slot, name, tensor, filled[slot.name])
            else:
                _fill(slot, tensor)
                filled[slot.name] = tensor if slot.target.is_meta and slot.name in aliases.values() else None
        elif not name.endswith(IGNORED_SUFFIXES):
            surplus.append(name)
    _check_complete([] if partial else [name for name in by_name if name not in filled], surplus)


def read_weight(slots: Iterable[WeightSlot], name: str, aliases: Mapping[str, str] | None = None) -> Tensor:
    """Return a copy of the parameter to which a checkpoint's tensor was loaded.

    With several ranks, all of them make this call, and each gets the whole tensor.

    Args:
        slots: slots of the model; iteration stops at the slot of that name.
        name: name of the tensor in the checkpoint.
        aliases: see `copy_weights`.

    Raises:
        RequestError: no slot has this name.
    """
    wanted, names = (aliases or {}).get(name, name), []
    for slot in slots:
        names.append(slot.name)
        if slot.name == wanted:
            held = (slot.target[0] if slot.per_row else slot.target).detach()
            held = held - slot.offset if slot.offset else held.clone()
            for dim, shard in slot.shards:
                held = _gathered(held, dim, shard)
            return held
    close = get_close_matches(name, names, 1)
    raise RequestError(f"the model has no weight {name!r}{f'; the nearest is {close[0]!r}' if close else ''}")


def _gathered(part: Tensor, dim: int, shard: Shard) -> Tensor:
    """Return a whole dimension from the parts of all ranks. Every rank makes this call."""
    if shard.communicator is None:
        return part
    shape = list(part.shape)
    shape[dim] = shard.size
    whole = part.new_zeros(shape)
    at = 0
    for start, stop, num_copies in shard.pieces:
        length = stop - start
        if shard.parallel.rank % num_copies == 0:
            whole.narrow(dim, start, length).copy_(part.narrow(dim, at, length))
        at += length
    return shard.communicator.all_reduce(whole)


def _check(slot: WeightSlot, name: str, tensor: Tensor) -> None:
    if tuple(tensor.shape) != slot.shape:
        raise WeightError(
            f"The checkpoint's {name!r} has shape {list(tensor.shape)}, but config.json requires {list(slot.shape)}"
        )
    if not tensor.is_floating_point():
        raise WeightError(
            f"The checkpoint's {name!r} has dtype {tensor.dtype}, which is not a dtype of weights. If the tensor is "
            "part of a quantized weight, config.json lacks the quantization_config that describes its format"
        )


def _fill(slot: WeightSlot, tensor: Tensor) -> None:
    with torch.no_grad():
        slot.target.copy_(slot.part_of(tensor))  # converts without an intermediate copy
        if slot.offset:
            slot.target.add_(slot.offset)


def _check_tie(slot: WeightSlot, name: str, tensor: Tensor, first: Tensor | None) -> None:
    """Refuse a second tensor for a slot, unless both tensors are equal."""
    same = torch.equal(slot.target, _as_placed(slot, tensor)) if first is None else torch.equal(first, tensor)
    if not same:
        raise WeightError(
            f"config.json ties {name!r} to another tensor, but the checkpoint contains both tensors, and they "
            "differ. Set tie_word_embeddings to false in config.json"
        )


def _as_placed(slot: WeightSlot, tensor: Tensor) -> Tensor:
    """Return a tensor in the form that its slot stores; the tensor itself if nothing changes."""
    converted = slot.part_of(tensor).to(slot.target)
    return converted + slot.offset if slot.offset else converted


def _check_complete(missing: Sequence[str], surplus: Sequence[str]) -> None:
    if not missing and not surplus:
        return
    faults = [f"lacks {_listed(missing)}"] if missing else []
    if surplus:
        faults.append(f"contains {_listed(surplus)}, which this model does not use")
    raise WeightError(f"The checkpoint does not fit its config.json: it {' and '.join(faults)}")


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:_NAMES_SHOWN])
    return shown if len(names) <= _NAMES_SHOWN else f"{shown} and {len(names) - _NAMES_SHOWN} more"
