"""The pictures of one request: their identities, the tower's inputs, and the tokens that stand for their features."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from graftlm.types import TokenIds

__all__ = ["FeatureRows", "MediaItem", "RequestMedia"]


class MediaItem:
    """One picture of a request.

    Attributes:
        key: 32 bytes that identify the picture's features.
        num_features: number of rows of the features.
        inputs: name -> array of the tower's inputs.
    """

    __slots__ = ("inputs", "key", "num_features")

    def __init__(self, key: bytes, num_features: int, inputs: Mapping[str, NDArray[Any]]) -> None:
        self.key = key
        self.num_features = num_features
        self.inputs = inputs


class FeatureRows(NamedTuple):
    """Rows of one picture's features, and the positions in the prompt of their tokens.

    Attributes:
        item: the picture.
        first: the first row.
        positions: int64 [k], the positions of the rows first : first + k.
    """

    item: MediaItem
    first: int
    positions: NDArray[np.int64]


class RequestMedia:
    """The pictures of one request. Immutable.

    Args:
        items: the pictures, in the order of the prompt.
        positions: int64 [F], ascending positions in the prompt of all pictures' feature tokens.
        feature_token_id: token id to show in place of a placeholder id.
        rope_positions: int64 [3, n], see `MediaProcessor.rope_positions`; None: the positions are 0, 1, 2 and so on.
        whole_runs: whether one step must compute a run of consecutive feature tokens, because attention inside the
            run is not causal.
    """

    def __init__(
        self,
        items: Sequence[MediaItem],
        positions: NDArray[np.int64],
        feature_token_id: int,
        rope_positions: NDArray[np.int64] | None = None,
        *,
        whole_runs: bool = False,
    ) -> None:
        self.items = tuple(items)
        self.positions = positions
        self.feature_token_id = feature_token_id
        self.rope_positions = rope_positions
        self.whole_runs = whole_runs
        self._ends = np.cumsum([item.num_features for item in self.items]).tolist()

    @cached_property
    def last_positions(self) -> list[int]:
        """The position of each picture's last feature token."""
        return [int(self.positions[end - 1]) for end in self._ends]

    @cached_property
    def first_positions(self) -> list[int]:
        """The position of each picture's first feature token."""
        return [int(self.positions[end - item.num_features]) for item, end in zip(self.items, self._ends, strict=True)]

    @property
    def rope_offset(self) -> int:
        """The number that is added to a generated token's index to get its position for the rotary embedding."""
        if self.rope_positions is None:
            return 0
        return int(self.rope_positions.max() + 1) - int(self.rope_positions.shape[1])

    def within(self, start: int, end: int) -> list[FeatureRows]:
        """Return the feature rows of the positions start : end, one entry per picture."""
        low, high = np.searchsorted(self.positions, (start, end)).tolist()
        found = []
        for item, item_end in zip(self.items, self._ends, strict=True):
            item_start = item_end - item.num_features
            first, last = max(low, item_start), min(high, item_end)
            if first < last:
                found.append(FeatureRows(item, first - item_start, self.positions[first:last]))
        return found

    def run_around(self, position: int) -> tuple[int, int] | None:
        """Return (start, end) of the run of feature tokens that contains `position - 1` and `position`; else None."""
        index = int(np.searchsorted(self.positions, position))
        if index in (0, len(self.positions)) or self.positions[index] != position:
            return None
        breaks = np.flatnonzero(np.diff(self.positions) != 1) + 1
        bounds = [0, *breaks.tolist(), len(self.positions)]
        run = int(np.searchsorted(bounds, index, side="right")) - 1
        if bounds[run] == index:
            return None
        return int(self.positions[bounds[run]]), int(self.positions[bounds[run + 1] - 1]) + 1

    def shown(self, token_ids: TokenIds) -> TokenIds:
        """Return token ids with the feature token in place of each placeholder id, int32 [n]."""
        return np.where(token_ids < 0, np.int32(self.feature_token_id), token_ids).astype(np.int32, copy=False)
