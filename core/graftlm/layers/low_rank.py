"""Low-rank adapters (arXiv:2106.09685) of one linear layer; each token uses its own adapter."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from graftlm.errors import AdapterError, InvariantError
from graftlm.layers.linear import Linear
from graftlm.layers.weights import part_of

__all__ = ["AdapterGroups", "AdapterMask", "AdapterRoute", "LowRankFactors", "LowRankLayer", "low_rank_bytes"]


@dataclass(frozen=True, slots=True)
class LowRankFactors:
    """The factors of the term up @ (down @ x) that one adapter adds to one projection.

    Attributes:
        down: [r, in].
        up: [out, r], already multiplied by the adapter's scale.
    """

    down: Tensor
    up: Tensor


@dataclass(frozen=True, slots=True)
class AdapterGroups:
    """A step's tokens grouped by adapter, for one product per adapter. Tokens without an adapter cost nothing.

    Attributes:
        groups: (slot, tokens) for each adapter of the step, after the tokens were permuted by `order`.
        order: int64 [T], the permutation that makes the tokens of each adapter contiguous; None if they are contiguous
            already.
        inverse: int64 [T], the inverse permutation.
    """

    num_tokens: int
    groups: tuple[tuple[int, slice], ...]
    order: Tensor | None = None
    inverse: Tensor | None = None


@dataclass(frozen=True, slots=True)
class AdapterMask:
    """A mask of each token's adapter, for products over all tokens and all adapters.

    These products have more arithmetic than products per group, but the number of kernels does not grow with the number
    of adapters. This is faster on a GPU, where launches dominate the time of small products.

    Attributes:
        mask: bool [T, slots], whether a token has the adapter of a slot.
    """

    mask: Tensor

    @property
    def num_tokens(self) -> int:
        """T, the number of tokens."""
        return self.mask.shape[0]


AdapterRoute = AdapterGroups | AdapterMask


def low_rank_bytes(layer: Linear, max_rank: int) -> int:
    """Return the size of each slot of a `LowRankLayer` in bytes."""
    return max_rank * (len(layer.parts) * layer.in_features + sum(layer.parts.values())) * layer.weight.dtype.itemsize


class LowRankLayer:
    """The factors of all adapters for one linear layer, and the products with them.

    A slot's factors are padded with zeros to the maximum rank. A layer with several projections has factors for each.

    Args:
        layer: the layer; its rows are the tokens of the batch, in order.
        num_slots: maximum number of adapters; their slots are 1 .. num_slots.
        max_rank: maximum rank of an adapter.
    """

    def __init__(self, layer: Linear, num_slots: int, max_rank: int) -> None:
        self._layer = layer
        self._max_rank = max_rank
        self._columns = _columns(layer.parts)
        weight = layer.weight
        shape = (num_slots, max_rank, len(layer.parts), layer.in_features)  # [slots, R, P, in]
        self._down = torch.zeros(shape, device=weight.device, dtype=weight.dtype)
        self._up = [  # [slots, R, out of the part]
            torch.zeros((num_slots, max_rank, size), device=weight.device, dtype=weight.dtype)
            for size in layer.parts.values()
        ]
        self._ranks = [[0] * len(layer.parts) for _ in range(num_slots)]

    @property
    def num_bytes(self) -> int:
        """Size of the factors in bytes."""
        return self._down.nbytes + sum(up.nbytes for up in self._up)

    def set(self, slot: int, factors: Mapping[str, LowRankFactors]) -> None:
        """Store an adapter in a slot that no running step uses.

        Factors must be finite. Zero times infinity is NaN, so in products over all slots, an infinite factor would also
        change the outputs of tokens with other adapters.

        Args:
            factors: name of a projection -> its whole factors, of which a rank stores its part. The adapter does not
                change projections without factors.

        Raises:
            AdapterError: a factor is not finite in the layer's dtype; the slot is then empty.
        """
        self.clear(slot)
        at = slot - 1
        for part, name in enumerate(self._layer.parts):
            if name in factors:
                rank = factors[name].down.shape[0]
                down = part_of(factors[name].down, 1, self._layer.inputs)
                up = part_of(factors[name].up, 0, self._layer.outputs[name])
                self._down[at, :rank, part].copy_(down)
                self._up[part][at, :rank].copy_(up.T)
                self._ranks[at][part] = rank
        if factors and not self._is_finite(slot):
            self.clear(slot)
            raise AdapterError(
                f"the factors of {self._layer.prefix}({', '.join(factors)}) are not finite in {self._down.dtype}"
            )

    def clear(self, slot: int) -> None:
        """Clear a slot that no running step uses; afterwards the slot adds nothing to outputs."""
        at = slot - 1
        for factors in (self._down, *self._up):
            factors[at].zero_()
        self._ranks[at] = [0] * len(self._ranks[at])

    def _is_finite(self, slot: int) -> bool:
        held = [factors[slot - 1].isfinite().all() for factors in (self._down, *self._up)]
        return bool(torch.stack(held).all())  # a single synchronisation with the device

    def route(self, route: AdapterRoute | None) -> None:
        """Set the adapter of each token of the next step; None: no token has an adapter."""
        if route is None:
            self._layer.adapt(None)
        elif isinstance(route, AdapterGroups):
            self._layer.adapt(lambda x, out: self._add_groups(route, x, out))
        else:
            self._layer.adapt(lambda x, out: self._add_masked(route, x, out))

    def _add_groups(self, route: AdapterGroups, x: Tensor, out: Tensor) -> Tensor:
        _check_rows(route, x)
        if route.order is None or route.inverse is None:
            self._add_in_order(route, x, out)
            return out
        added = torch.zeros_like(out)
        self._add_in_order(route, x.index_select(0, route.order), added)
        return out.add_(added.index_select(0, route.inverse))  # several times as fast as index_add_, in bfloat16

    def _add_in_order(self, route: AdapterGroups, x: Tensor, out: Tensor) -> None:
        for slot, tokens in route.groups:
            ranks = self._ranks[slot - 1]
            rank = max(ranks)
            if not rank:
                continue
            down = self._down[slot - 1, :rank].view(-1, x.shape[1])  # [r * P, in]
            shrunk = (x[tokens] @ down.T).view(-1, rank, len(ranks))
            for part, columns in enumerate(self._columns):
                if ranks[part]:
                    out[tokens, columns].addmm_(shrunk[:, :, part], self._up[part][slot - 1, :rank])

    def _add_masked(self, route: AdapterMask, x: Tensor, out: Tensor) -> Tensor:
        _check_rows(route, x)
        num_slots, max_rank, num_parts, in_features = self._down.shape
        shrunk = x @ self._down.view(-1, in_features).T  # [T, slots * R * P]
        shrunk = shrunk.view(-1, num_slots, max_rank, num_parts)
        shrunk = torch.where(route.mask[:, :, None, None], shrunk, 0)  # a product with 0 would turn overflows into NaN
        for part, columns in enumerate(self._columns):
            up = self._up[part].view(num_slots * max_rank, -1)
            out[:, columns].addmm_(shrunk[..., part].reshape(-1, num_slots * max_rank), up)
        return out


def _columns(parts: Mapping[str, int]) -> list[slice]:
    """Return the columns of each projection in the layer's output."""
    starts = accumulate(parts.values(), initial=0)
    return [slice(start, start + size) for start, size in zip(starts, parts.values(), strict=False)]


def _check_rows(route: AdapterRoute, x: Tensor) -> None:
    if x.shape[0] != route.num_tokens:
        raise InvariantError(
            f"a linear layer with adapters was called with {x.shape[0]} rows in a step of {route.num_tokens} tokens"
        )
