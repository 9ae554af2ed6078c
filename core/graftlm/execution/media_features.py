"""Computes and stores the features of pictures, as the media work of plans says."""

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from graftlm.contracts import MediaTower
from graftlm.errors import InvariantError
from graftlm.execution.batch import to_device
from graftlm.execution.sliced_tower import SlicedTower
from graftlm.media.request_media import MediaItem
from graftlm.plan import FeatureSpan, MediaResult, MediaWork

__all__ = ["MediaFeatures"]

_logger = logging.getLogger(__name__)


class MediaFeatures:
    """The features of pictures by key, and the queue of pictures whose features are missing.

    On a CPU, a picture is computed in slices over several steps. On a GPU, each step computes a whole picture.

    Args:
        tower: computes features.
        device: device of the tower and of the features.
        clock: monotonic clock in seconds.
    """

    def __init__(self, tower: MediaTower, device: torch.device, clock: Callable[[], float] = time.monotonic) -> None:
        self._tower = tower
        self._device = device
        self._clock = clock
        self._sliced = SlicedTower(tower, clock) if device.type == "cpu" else None
        self._queue: OrderedDict[bytes, MediaItem] = OrderedDict()
        self._features: dict[bytes, Tensor] = {}
        self._current: MediaItem | None = None

    def work(self, work: MediaWork) -> MediaResult:
        """Delete features, queue pictures, and compute for a limited time; see `MediaWork`."""
        start = self._clock()
        for key in work.drop:
            self._drop(key)
        for item in work.begin:
            self._queue[item.key] = item
        ready: list[bytes] = []
        errors: dict[bytes, str] = {}
        while self._queue:
            left_s = work.max_s - (self._clock() - start)
            if left_s <= 0 and (ready or errors):
                break
            done = self._advance(max(left_s, 0.0))
            if done is None:
                break
            key, result = done
            if isinstance(result, Tensor):
                self._features[key] = result
                ready.append(key)
            else:
                _logger.error("the features of a picture could not be computed", exc_info=result)
                errors[key] = f"the picture's features could not be computed: {type(result).__name__}: {result}"
        return MediaResult(tuple(ready), errors, self._clock() - start)

    def rows(self, spans: Sequence[FeatureSpan]) -> tuple[Tensor, Tensor]:
        """Return the features of spans, [F, width], and the indices of their tokens, int64 [F].

        Raises:
            InvariantError: features are missing.
        """
        parts = []
        for span in spans:
            features = self._features.get(span.key)
            if features is None:
                raise InvariantError("a step needs features of a picture that are not in memory")
            parts.append(features[span.first : span.first + len(span.token_idx)])
        token_idx = np.concatenate([span.token_idx for span in spans])
        return torch.cat(parts), to_device(token_idx, self._device)

    def close(self) -> None:
        """Delete all features, and end the tower's thread."""
        self._queue.clear()
        self._features.clear()
        if self._sliced is not None:
            self._sliced.close()

    def _drop(self, key: bytes) -> None:
        self._features.pop(key, None)
        item = self._queue.pop(key, None)
        if item is not None and item is self._current and self._sliced is not None:
            self._sliced.cancel()
            self._current = None

    def _advance(self, max_s: float) -> tuple[bytes, Tensor | BaseException] | None:
        """Compute the first picture of the queue for some time; return its key and result if it is complete."""
        item = next(iter(self._queue.values()))
        if self._sliced is None:
            result: Tensor | BaseException | None = self._whole(item)
        else:
            if self._current is not item:
                self._current = item
                self._sliced.begin(self._inputs(item))
            result = self._sliced.advance(max_s)
        if result is None:
            return None
        self._current = None
        del self._queue[item.key]
        return item.key, _checked(result, item)

    def _whole(self, item: MediaItem) -> Tensor | BaseException:
        try:
            return self._tower.features(self._inputs(item))
        except Exception as error:  # a checkpoint's tower may raise any exception; it fails only this picture
            return error

    def _inputs(self, item: MediaItem) -> dict[str, Tensor]:
        return {
            name: to_device(np.require(array, requirements="W"), self._device) for name, array in item.inputs.items()
        }


def _checked(result: Tensor | BaseException, item: MediaItem) -> Tensor | BaseException:
    if isinstance(result, Tensor) and len(result) != item.num_features:
        return InvariantError(f"the tower returned {len(result)} rows of features, expected {item.num_features}")
    return result
