"""What low-rank adapters (arXiv:2106.09685) add to the output of one linear layer, each token by its own adapter."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from graftlm.errors import InvariantError
from graftlm.layers.linear import Linear

__all__ = ["AdapterGroups", "AdapterMask", "AdapterRoute", "LowRankFactors", "LowRankLayer"]


@dataclass(frozen=True, slots=True)
class LowRankFactors:
    """What one adapter adds to one projection: up @ (down @ x).

    Attributes:
        down: [r, in].
        up: [out, r], with the adapter's scale in it.
    """

    down: Tensor
    up: Tensor


@dataclass(frozen=True, slots=True)
class AdapterGroups:
    """A step's tokens by adapter, for products over each group alone: no work for tokens without one.

    Attributes:
        groups: (slot, its tokens) for each adapter of the step; int64 [n], or a range where they follow one another.
    """

    num_tokens: int
    groups: tuple[tuple[int, Tensor | slice], ...]


@dataclass(frozen=True, slots=True)
class AdapterMask:
    """A step's tokens by adapter, for products over all tokens and all adapters at once.

    That is more arithmetic than by groups, in a number of kernels that does not grow with the adapters: on a GPU, where
    small products cost their launch, it is the faster one.

    Attributes:
        mask: [T, slots], 1 where a token has the adapter of a slot, else 0; in the layers' dtype.
    """

    mask: Tensor

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.mask.shape[0]


AdapterRoute = AdapterGroups | AdapterMask


class LowRankLayer:
    """The factors of all adapters for one linear layer, and the products with them.

    A slot's factors are padded with zeros to the largest rank. A layer of several projections has factors for each.

    Args:
        layer: whose rows are the tokens of the batch, in their order.
        num_slots: adapters at most; they have the slots 1 .. num_slots.
        max_rank: of an adapter.
    """

    def __init__(self, layer: Linear, num_slots: int, max_rank: int) -> None:
        self._layer = layer
        self._max_rank = max_rank
        self._columns = _columns(layer.parts)
        weight = layer.weight
        shape = (len(layer.parts), num_slots, max_rank, layer.in_features)  # [P, slots, R, in]
        self._down = torch.zeros(shape, device=weight.device, dtype=weight.dtype)
        self._up = [  # [out of the part, slots, R]
            torch.zeros((size, num_slots, max_rank), device=weight.device, dtype=weight.dtype)
            for size in layer.parts.values()
        ]
        self._ranks = [[0] * len(layer.parts) for _ in range(num_slots)]

    @property
    def num_bytes(self) -> int:
        """Memory of the factors."""
        return self._down.nbytes + sum(up.nbytes for up in self._up)

    def set(self, slot: int, factors: Mapping[str, LowRankFactors]) -> None:
        """Put an adapter into a slot; no step under way uses it.

        Args:
            factors: by the name of the projection; without any, the adapter leaves that projection as it is.
        """
        at = slot - 1
        for part, name in enumerate(self._layer.parts):
            self._down[part, at].zero_()
            self._up[part][:, at].zero_()
            self._ranks[at][part] = 0
            if name in factors:
                rank = factors[name].down.shape[0]
                self._down[part, at, :rank].copy_(factors[name].down)
                self._up[part][:, at, :rank].copy_(factors[name].up)
                self._ranks[at][part] = rank

    def route(self, route: AdapterRoute | None) -> None:
        """Say which adapter each token of the next step has; None: the step has none."""
        if route is None:
            self._layer.adapt(None)
        elif isinstance(route, AdapterGroups):
            self._layer.adapt(lambda x, out: self._add_groups(route, x, out))
        else:
            self._layer.adapt(lambda x, out: self._add_masked(route, x, out))

    def _add_groups(self, route: AdapterGroups, x: Tensor, out: Tensor) -> Tensor:
        _check_rows(route, x)
        for slot, tokens in route.groups:
            rows = x[tokens]
            for part, rank in enumerate(self._ranks[slot - 1]):
                if rank:
                    self._add_group(part, slot - 1, rank, rows, tokens, out)
        return out

    def _add_group(self, part: int, at: int, rank: int, rows: Tensor, tokens: Tensor | slice, out: Tensor) -> None:
        shrunk = rows @ self._down[part, at, :rank].T  # [n, r]
        up = self._up[part][:, at, :rank].T  # [r, out]
        target = out[:, self._columns[part]]
        if isinstance(tokens, slice):
            target[tokens].addmm_(shrunk, up)
        else:
            target.index_add_(0, tokens, shrunk @ up)

    def _add_masked(self, route: AdapterMask, x: Tensor, out: Tensor) -> Tensor:
        _check_rows(route, x)
        num_parts, num_slots, max_rank, in_features = self._down.shape
        shrunk = x @ self._down.view(-1, in_features).T  # [T, P * slots * R]
        shrunk = shrunk.view(-1, num_parts, num_slots, max_rank) * route.mask[:, None, :, None]
        for part, columns in enumerate(self._columns):
            up = self._up[part].view(-1, num_slots * max_rank)
            out[:, columns].addmm_(shrunk[:, part].reshape(-1, num_slots * max_rank), up.T)
        return out


def _columns(parts: Mapping[str, int]) -> Sequence[slice]:
    ends = torch.tensor(list(parts.values())).cumsum(0).tolist()
    return [slice(end - size, end) for end, size in zip(ends, parts.values(), strict=True)]


def _check_rows(route: AdapterRoute, x: Tensor) -> None:
    if x.shape[0] != route.num_tokens:
        raise InvariantError(
            f"a linear layer with adapters was called with {x.shape[0]} rows in a step of {route.num_tokens} tokens"
        )
