"""Files that are hostile or malformed are refused by their headers, quickly and with little memory."""

import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from graftlm.errors import MediaError
from graftlm.media import MediaLimits
from graftlm.media.decoding import decode_picture, picture_of
from graftlm.testing.tiny_media import random_picture

LIMITS = MediaLimits(max_bytes=2**20, max_pixels=2**20)
PICTURE = random_picture(20, 10)


def encoded(kind="PNG", picture=PICTURE, **options):
    buffer = io.BytesIO()
    Image.fromarray(picture).save(buffer, kind, **options)
    return buffer.getvalue()


def chunk(kind, body):
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def png(width, height, body=b""):
    """Return a PNG whose header states a size, and whose data are short."""
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(body)) + chunk(b"IEND", b"")


def animation(num_frames):
    head = b"GIF89a" + struct.pack("<HHBBB", 1, 1, 0x80, 0, 0) + b"\x00\x00\x00\xff\xff\xff"
    frame = b"\x21\xf9\x04\x00\x00\x00\x00\x00" + b"\x2c\x00\x00\x00\x00\x01\x00\x01\x00\x00" + b"\x02\x02\x44\x01\x00"
    return head + frame * num_frames + b"\x3b"


@pytest.mark.parametrize("kind", ["PNG", "BMP", "WEBP", "GIF", "JPEG"])
def test_formats(kind):
    decoded = decode_picture(encoded(kind, lossless=True) if kind == "WEBP" else encoded(kind), LIMITS)
    assert (decoded.shape, decoded.dtype) == ((10, 20, 3), np.uint8)
    if kind in ("PNG", "BMP", "WEBP"):
        assert (decoded == PICTURE).all()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (png(50_000, 50_000), "max_pixels"),
        (png(2**31 - 1, 2**31 - 1), "max_pixels"),
        (png(2000, 1000), "2,000 x 1,000 pixels"),
        (png(20, 10), "cannot be decoded"),
        (animation(2), "animation"),
        (animation(40_000), "animation"),
        (encoded()[:60], "cannot be decoded"),
        (encoded("JPEG")[:200], "decoded|supported format"),
        (b"", "no picture of a supported format"),
        (b"this text has the name photo.jpg", "no picture of a supported format"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "no picture of a supported format"),
        (b"\x89PNG\r\n\x1a\n" + b"\x00" * 40, "decoded|supported format"),
        (encoded("JPEG") + b"\xff\xda" * 200, "scans"),
        (bytes(2**20 + 1), "max_bytes"),
    ],
)
def test_bad_files_are_refused(data, message):
    with pytest.raises(MediaError, match=message):
        decode_picture(data, LIMITS)


def test_a_rotated_photo_is_upright_and_transparency_is_dropped():
    image = Image.fromarray(PICTURE)
    exif = image.getexif()
    exif[274] = 6
    buffer = io.BytesIO()
    image.save(buffer, "PNG", exif=exif)
    assert (decode_picture(buffer.getvalue(), LIMITS) == np.rot90(PICTURE, -1)).all()
    assert decode_picture(encoded(picture=np.zeros((4, 4, 4), dtype=np.uint8)), LIMITS).shape == (4, 4, 3)


@pytest.mark.parametrize("array", [np.zeros((4, 4)), np.zeros((4, 4, 4), np.uint8), np.zeros((4, 4, 3), np.float32)])
def test_arrays_of_another_form_are_refused(array):
    with pytest.raises(MediaError, match="uint8"):
        picture_of(array, LIMITS)


@pytest.mark.parametrize("count", [60, pytest.param(3000, marks=pytest.mark.full)])
def test_mutated_files_decode_or_are_refused(count):
    rng = np.random.default_rng(0)
    sources = [encoded(kind) for kind in ("PNG", "JPEG", "WEBP", "GIF", "BMP")]
    for i in range(count):
        data = bytearray(sources[i % len(sources)])
        for _ in range(rng.integers(1, 12)):
            data[rng.integers(len(data))] = rng.integers(256)
        if rng.random() < 0.3:
            del data[rng.integers(len(data)) :]
        try:
            assert decode_picture(bytes(data), LIMITS).ndim == 3
        except MediaError:
            continue
