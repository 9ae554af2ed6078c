"""Prepares pictures for Qwen2-VL and Qwen2.5-VL, whose tokens have positions of three axes.

Transformers' processors of these models need torchvision for videos. Their image processors do not, and the rest is a
few lines.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from graftlm.contracts import MediaContext, MediaProcessor, MediaTower, Picture, PreparedMedia
from graftlm.types import TokenIds
from graftlm_media.processor import arrays_of, input_names, load_error, settings_of

__all__ = ["QwenMedia", "rope_positions"]


class QwenMedia(MediaProcessor):
    """The image processor and the tower of a checkpoint.

    Args:
        context: the checkpoint.

    Raises:
        CheckpointError: Transformers cannot load the configuration, the tokenizer or the image processor.
    """

    def __init__(self, context: MediaContext) -> None:
        from transformers import AutoConfig, AutoImageProcessor, AutoModel, AutoTokenizer

        try:
            self._config = AutoConfig.from_pretrained(context.path, local_files_only=True)
            self._image_processor: Any = AutoImageProcessor.from_pretrained(context.path, local_files_only=True)
            tokenizer = AutoTokenizer.from_pretrained(context.path, local_files_only=True)
            kind = AutoModel._model_mapping[type(self._config)]
        except Exception as error:  # the loaders may raise any exception of their parsers
            raise load_error(context.path, error) from error
        self._marker = str(tokenizer.convert_ids_to_tokens(self.feature_token_id))
        self._input_names = input_names(kind)
        self._settings = settings_of(self._image_processor, {})

    @property
    def marker(self) -> str:
        """The configuration's image token."""
        return self._marker

    @property
    def feature_token_id(self) -> int:
        """The configuration's image token."""
        return int(self._config.image_token_id)

    @property
    def settings(self) -> bytes:
        """The class and the entries of the image processor, as JSON."""
        return self._settings

    def prepare(self, picture: Picture) -> PreparedMedia:
        """Cut a picture into patches; the tower merges squares of patches to one feature."""
        from PIL import Image

        found = self._image_processor([Image.fromarray(picture)], return_tensors="pt")
        num_features = int(found["image_grid_thw"].prod()) // self._image_processor.merge_size**2
        return PreparedMedia(self._marker * num_features, num_features, arrays_of(found, self._input_names))

    def rope_positions(self, token_ids: TokenIds, items: Sequence[PreparedMedia]) -> NDArray[np.int64]:
        """Return the positions of a prompt's tokens; see `rope_positions`."""
        merge_size = self._image_processor.merge_size
        grids = [tuple(item.inputs["image_grid_thw"][0].tolist()) for item in items]
        merged = [(t, height // merge_size, width // merge_size) for t, height, width in grids]
        return rope_positions(token_ids == self.feature_token_id, merged)

    def load_tower(self, weights: Iterable[tuple[str, Tensor]], device: torch.device, dtype: torch.dtype) -> MediaTower:
        """Load the tower."""
        from graftlm_media.tower import TransformersTower

        return TransformersTower(self._config, weights, device, dtype)


def rope_positions(is_feature: NDArray[np.bool_], grids: Sequence[tuple[int, int, int]]) -> NDArray[np.int64]:
    """Return positions of three axes, int64 [3, n].

    A text token has the same position on all axes. The features of a picture form a grid that starts at the next
    position; the text after it continues after the longest side of the grid.

    Args:
        is_feature: bool [n], whether a token is a feature of a picture.
        grids: the number of features of each picture along time, height and width.
    """
    positions = np.zeros((3, len(is_feature)), dtype=np.int64)
    index = position = 0
    places = np.flatnonzero(is_feature)
    for grid in grids:
        start = int(places[np.searchsorted(places, index)])
        positions[:, index:start] = np.arange(position, position + start - index)
        position += start - index
        index = start + int(np.prod(grid))
        positions[:, start:index] = position + np.indices(grid).reshape(3, -1)
        position += max(grid[1:])
    positions[:, index:] = np.arange(position, position + len(is_feature) - index)
    return positions
