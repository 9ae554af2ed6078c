"""Decodes picture files, after checks of the size that their headers state."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from graftlm.errors import MediaError, UnsupportedFeatureError
from graftlm.media.limits import MediaLimits

if TYPE_CHECKING:
    from PIL.Image import Image

    from graftlm.contracts import Picture

__all__ = ["decode_picture", "picture_of", "require_pillow"]

_FORMATS: Final = ("PNG", "JPEG", "WEBP", "GIF", "BMP")

#: Maximum number of scans of a progressive JPEG. Usual files have about 10; each scan takes as long as a whole picture.
_MAX_JPEG_SCANS: Final = 100


def require_pillow() -> Any:
    """Return the module PIL.Image.

    Raises:
        UnsupportedFeatureError: Pillow is not installed.
    """
    try:
        from PIL import Image
    except ImportError as error:
        raise UnsupportedFeatureError("pictures need Pillow: pip install 'graftlm[media]'") from error
    return Image


def decode_picture(data: bytes | memoryview, limits: MediaLimits) -> Picture:
    """Decode the content of a PNG, JPEG, WebP, GIF or BMP file as uint8 [H, W, 3].

    The rotation in the metadata of a photo is applied; transparency is dropped.

    Raises:
        MediaError: the file is too large, malformed, of another format, or an animation.
        UnsupportedFeatureError: Pillow is not installed.
    """
    if len(data) > limits.max_bytes:
        raise MediaError(f"the picture has {len(data):,} bytes; the maximum set by media.max_bytes is "
                         f"{limits.max_bytes:,}")  # fmt: skip
    pil = require_pillow()
    try:
        with pil.open(io.BytesIO(data), formats=_FORMATS) as image:
            _check_header(image, data, limits)
            return _pixels(image)
    except MediaError:
        raise
    except (pil.DecompressionBombError, pil.DecompressionBombWarning) as error:
        raise MediaError(f"the picture has more pixels than media.max_pixels: {error}") from error
    except pil.UnidentifiedImageError as error:
        raise MediaError(
            f"the data are no picture of a supported format: {', '.join(_FORMATS)}; they start with "
            f"{bytes(data[:12])!r}"
        ) from error
    except Exception as error:  # the decoders raise many kinds of exceptions for malformed files
        raise MediaError(f"the picture cannot be decoded: {type(error).__name__}: {str(error)[:200]}") from error


def picture_of(image: Any, limits: MediaLimits) -> Picture:
    """Return a PIL image, or an array uint8 [H, W, 3], as a picture.

    Raises:
        MediaError: the array has another dtype or shape, or the picture is too large.
    """
    if isinstance(image, np.ndarray):
        if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3:
            raise MediaError(f"a picture as an array must be uint8 [H, W, 3], got {image.dtype} {list(image.shape)}")
        _check_pixels(image.shape[1], image.shape[0], limits)
        return image
    width, height = image.size
    _check_pixels(width, height, limits)
    return _pixels(image)


def _check_header(image: Image, data: bytes | memoryview, limits: MediaLimits) -> None:
    width, height = image.size
    _check_pixels(width, height, limits)
    if getattr(image, "is_animated", False):
        raise MediaError("the picture is an animation; send one of its frames")
    if image.format == "JPEG" and bytes(data).count(b"\xff\xda") > _MAX_JPEG_SCANS:
        raise MediaError(f"the JPEG has more than {_MAX_JPEG_SCANS} scans")


def _check_pixels(width: int, height: int, limits: MediaLimits) -> None:
    if width < 1 or height < 1:
        raise MediaError(f"the picture has no pixels: {width} x {height}")
    if width * height > limits.max_pixels:
        raise MediaError(
            f"the picture has {width:,} x {height:,} pixels; the maximum set by media.max_pixels is "
            f"{limits.max_pixels:,} pixels"
        )


def _pixels(image: Image) -> Picture:
    from PIL import ImageOps

    upright = ImageOps.exif_transpose(image)
    return np.asarray((image if upright is None else upright).convert("RGB"))
