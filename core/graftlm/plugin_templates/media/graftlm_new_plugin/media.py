"""The media processor, whose features are projections of the mean colours of tiles."""

from collections.abc import Iterable, Mapping
from typing import Final

import numpy as np
import torch
from graftlm.contracts import MediaContext, MediaProcessor, MediaTower, Picture, PreparedMedia
from graftlm.errors import WeightError
from torch import Tensor

__all__ = ["TILES", "Tiles", "TilesTower"]

#: Number of tiles along each axis of a picture.
TILES: Final = 4


class Tiles(MediaProcessor):
    """Divides each picture into tiles; each tile is one feature token."""

    def __init__(self, context: MediaContext) -> None:
        entries = context.config.media or {}
        self._marker = str(entries["image_token"])
        self._token_id = int(entries["image_token_id"])

    @property
    def marker(self) -> str:
        """The entry `image_token` of config.json."""
        return self._marker

    @property
    def feature_token_id(self) -> int:
        """The entry `image_token_id` of config.json."""
        return self._token_id

    @property
    def settings(self) -> bytes:
        """The number of tiles."""
        return f"{TILES} tiles".encode()

    def prepare(self, picture: Picture) -> PreparedMedia:
        """Compute the mean colour of each tile, from 0 to 1."""
        rows = np.array_split(picture.astype(np.float32) / 255, TILES)
        colours = [tile.mean(axis=(0, 1)) for row in rows for tile in np.array_split(row, TILES, axis=1)]
        return PreparedMedia(self._marker * len(colours), len(colours), {"colours": np.nan_to_num(np.array(colours))})

    def load_tower(self, weights: Iterable[tuple[str, Tensor]], device: torch.device, dtype: torch.dtype) -> MediaTower:
        """Load the projection, "tower.weight"."""
        found = dict(weights)
        if "tower.weight" not in found:
            raise WeightError("The checkpoint lacks 'tower.weight'")
        return TilesTower(found["tower.weight"].to(device, dtype))


class TilesTower(MediaTower):
    """Projects colours to the hidden size of the text model.

    Args:
        weight: [hidden, 3].
    """

    def __init__(self, weight: Tensor) -> None:
        self._weight = weight

    @property
    def width(self) -> int:
        """The hidden size."""
        return len(self._weight)

    def features(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Return one row for each tile."""
        return inputs["colours"].to(self._weight) @ self._weight.T
