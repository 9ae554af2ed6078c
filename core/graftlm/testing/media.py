"""The conformance kit for media processors."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from graftlm.checkpoint import iter_weights, load_model_config, tower_weights
from graftlm.contracts import MediaContext, MediaProcessor, MediaTower, Picture, PreparedMedia
from graftlm.testing.conformance import Conformance
from graftlm.tokenization import Tokenizer

__all__ = ["MediaConformance"]

#: Sizes of the kit's pictures: (width, height).
_SIZES = ((48, 32), (31, 64), (96, 96))


class MediaConformance(Conformance, ABC):
    """The kit for the contract `MediaProcessor`, on a CPU in float32.

        class TestMyMedia(MediaConformance):
            def create(self, context):
                return MyMedia(context)

            def checkpoint(self):
                return Path("a folder with a small checkpoint")

    Attributes:
        parameters: `index` is the index of a picture.
        tolerance: largest difference of features that rounding may cause, relative to the largest absolute value.
    """

    parameters: ClassVar[Mapping[str, Sequence[Any]]] = {"index": (0, 1, 2)}
    tolerance: ClassVar[float] = 1e-4

    @abstractmethod
    def create(self, context: MediaContext) -> MediaProcessor:
        """Return a new processor."""

    @abstractmethod
    def checkpoint(self) -> Path:
        """Return the folder of a small checkpoint with a tokenizer."""

    def processor(self) -> MediaProcessor:
        """Return a new processor of the checkpoint."""
        path = self.checkpoint()
        return self.create(MediaContext(load_model_config(path), path))

    def tower(self, processor: MediaProcessor) -> MediaTower:
        """Return the checkpoint's tower."""
        return processor.load_tower(tower_weights(iter_weights(self.checkpoint())), torch.device("cpu"), torch.float32)

    def test_the_marker_is_one_token(self) -> None:
        """The tokenizer encodes the marker as one token."""
        ids = Tokenizer.load(self.checkpoint()).encode(self.processor().marker, add_special_tokens=False)
        assert len(ids) == 1, f"the marker has {len(ids)} tokens"

    def test_the_text_has_a_token_for_each_feature(self, index: int) -> None:
        """The text of a prepared picture contains exactly `num_features` feature tokens."""
        processor = self.processor()
        prepared = processor.prepare(_picture(index))
        ids = Tokenizer.load(self.checkpoint()).encode(prepared.text, add_special_tokens=False)
        found = int((ids == processor.feature_token_id).sum())
        assert prepared.num_features > 0
        assert found == prepared.num_features, f"{found} feature tokens for {prepared.num_features} features"

    def test_preparation_is_repeatable(self, index: int) -> None:
        """The same picture always has the same text and the same inputs; the settings do not change."""
        first, second = self.processor(), self.processor()
        once, again = first.prepare(_picture(index)), second.prepare(_picture(index))
        assert first.settings == second.settings
        assert once.text == again.text
        assert once.inputs.keys() == again.inputs.keys()
        assert all(np.array_equal(once.inputs[name], again.inputs[name]) for name in once.inputs)

    def test_features_have_their_shape(self, index: int) -> None:
        """Features have the shape [num_features, width] and are finite."""
        processor = self.processor()
        prepared, tower = processor.prepare(_picture(index)), self.tower(processor)
        features = _features(tower, prepared)
        assert list(features.shape) == [prepared.num_features, tower.width], f"features are {list(features.shape)}"
        assert features.isfinite().all()

    def test_features_depend_on_one_picture(self, index: int) -> None:
        """A picture's features do not depend on pictures that were computed before."""
        processor = self.processor()
        prepared = [processor.prepare(_picture(i)) for i in range(len(_SIZES))]
        tower = self.tower(processor)
        for other in prepared:
            _features(tower, other)
        expected = _features(self.tower(processor), prepared[index])
        difference = (_features(tower, prepared[index]) - expected).abs().max()
        assert difference <= self.tolerance * expected.abs().max(), f"features differ by {difference:.3g}"

    def test_positions_have_three_axes(self, index: int) -> None:
        """`rope_positions` is int64 [3, n], or None."""
        processor = self.processor()
        prepared = processor.prepare(_picture(index))
        ids = Tokenizer.load(self.checkpoint()).encode(prepared.text, add_special_tokens=False)
        positions = processor.rope_positions(ids, [prepared])
        assert positions is None or (positions.dtype == np.int64 and positions.shape == (3, len(ids)))


def _picture(index: int) -> Picture:
    width, height = _SIZES[index]
    return np.random.default_rng(index).integers(256, size=(height, width, 3), dtype=np.uint8)


def _features(tower: MediaTower, prepared: PreparedMedia) -> Tensor:
    inputs = {name: torch.from_numpy(np.array(array)) for name, array in prepared.inputs.items()}
    with torch.inference_mode():
        return tower.features(inputs).clone()
