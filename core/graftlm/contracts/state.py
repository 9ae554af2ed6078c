"""Recurrent states: what a model's layers store, the segments of a step, and a prefix cache's view of stored states."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from graftlm.types import PageIds

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["StateBatch", "StateLayer", "StateSegments", "StateTensor", "StateView"]


@dataclass(frozen=True, slots=True)
class StateTensor:
    """One tensor of a layer's state.

    Attributes:
        name: name of the tensor, such as "conv" or "recurrent", for messages.
        shape: shape of the tensor of one slot.
        dtype: dtype of the tensor.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Number of bytes per slot."""
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class StateLayer:
    """The state of one recurrent layer. The initial state of every tensor is zero.

    Attributes:
        layer_id: index among the model's state layers.
        tensors: the tensors of the state.
    """

    layer_id: int
    tensors: tuple[StateTensor, ...]

    @property
    def num_bytes(self) -> int:
        """Number of bytes per slot."""
        return sum(tensor.num_bytes for tensor in self.tensors)


@dataclass(frozen=True, slots=True)
class StateSegments:
    """The N runs of tokens of one step, in the order in which their states are computed.

    Segment i reads the state in slot sources[i], computes its tokens, and writes the state after its last token to slot
    targets[i]. A request's tokens are one segment, or several where a state within them is stored:

        tokens of a request      0 .................... 63 | 64 ......... 99
        segments (source, target)       (0, 41)            |     (41, 2)        slot 41 stores the state after 64 tokens

    Slot 0 is the initial state, which is zero; it is never a target. A segment may read a slot that an earlier segment
    of the same step writes. Each slot is the target of at most one segment of a step, and no segment reads it before
    the segment that writes it, except this segment itself.

    Attributes:
        starts: int32 [N], index of the first token among the step's T tokens.
        lens: int32 [N], number of tokens, at least 1.
        sources, targets: int32 [N], slots.
        num_decodes: number of first segments that have one token each and depend on no other segment. Segment i of
            these has the token i.
    """

    starts: NDArray[np.int32]
    lens: NDArray[np.int32]
    sources: NDArray[np.int32]
    targets: NDArray[np.int32]
    num_decodes: int


@dataclass(frozen=True, slots=True)
class StateBatch:
    """The segments of a step, for the layers that compute them.

    Attributes:
        segments: the segments on the host.
        sources, targets: int64 [N], the same slots on the device.
    """

    segments: StateSegments
    sources: Tensor
    targets: Tensor


class StateView(Protocol):
    """A read-only view of the pages at whose end a state is stored.

    A state is stored for a page and not for a node of a tree, so a split of a node does not affect it.
    """

    @property
    def version(self) -> int:
        """A counter that increases whenever the result of `holds` may have changed."""
        ...

    def holds(self, pages: PageIds) -> NDArray[np.bool_]:
        """Return whether the state after each page's last token is stored: bool, same shape as `pages`."""
        ...
