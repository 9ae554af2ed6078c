"""Prepared pictures of recent requests, by the content of their files."""

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np

from graftlm.contracts import MediaProcessor, Picture, PreparedMedia
from graftlm.errors import GraftlmError, MediaError
from graftlm.media.decoding import decode_picture, picture_of
from graftlm.media.limits import MediaLimits
from graftlm.media.placeholders import media_key, picture_digest
from graftlm.media.request_media import MediaItem

__all__ = ["PictureStore"]

_Prepared = tuple[MediaItem, PreparedMedia]


class PictureStore:
    """Decodes and prepares pictures, and keeps the latest ones. All methods may be called from several threads.

    Args:
        processor: prepares pictures.
        limits: the limits of a picture.
        max_bytes: maximum size of all kept pictures in bytes.

    Attributes:
        num_prepared: number of pictures that were prepared, and not found.
    """

    def __init__(self, processor: MediaProcessor, limits: MediaLimits, max_bytes: int) -> None:
        self.num_prepared = 0
        self._processor = processor
        self._limits = limits
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._kept: OrderedDict[bytes, _Prepared] = OrderedDict()
        self._lock = threading.Lock()

    def prepared(self, content: Any) -> _Prepared:
        """Return a picture's item and its prepared form.

        Args:
            content: the content of a file, a PIL image, or an array uint8 [H, W, 3].

        Raises:
            MediaError: the picture is malformed or too large, or the model cannot use it.
        """
        if not isinstance(content, bytes):
            picture = picture_of(content, self._limits)
            return self._find(picture_digest(picture), lambda: picture)
        if len(content) > self._limits.max_bytes:
            decode_picture(content, self._limits)  # raises the error
        return self._find(hashlib.sha256(content).digest(), lambda: decode_picture(content, self._limits))

    def _find(self, digest: bytes, decode: Callable[[], Picture]) -> _Prepared:
        with self._lock:
            found = self._kept.get(digest)
            if found is not None:
                self._kept.move_to_end(digest)
                return found
        made = self._prepare(decode())
        with self._lock:
            self.num_prepared += 1
            if digest not in self._kept:
                self._kept[digest] = made
                self._num_bytes += _size(made)
            while self._num_bytes > self._max_bytes and self._kept:
                _, oldest = self._kept.popitem(last=False)
                self._num_bytes -= _size(oldest)
        return made

    def _prepare(self, picture: Picture) -> _Prepared:
        processor = self._processor
        try:
            prepared = processor.prepare(picture)
        except GraftlmError:
            raise
        except Exception as error:  # a checkpoint's processor may raise any exception
            height, width = picture.shape[:2]
            raise MediaError(
                f"the model's processor refuses the picture of {width} x {height} pixels: {type(error).__name__}: "
                f"{str(error)[:200]}"
            ) from error
        key = media_key(picture_digest(picture), processor.settings, prepared)
        return MediaItem(key, prepared.num_features, prepared.inputs), prepared


def _size(prepared: _Prepared) -> int:
    return sum(np.asarray(array).nbytes for array in prepared[0].inputs.values())
