"""Reads pictures from the forms in which requests and programs give them."""

import base64
import binascii
from pathlib import Path
from typing import Any, Final, TypeAlias

from graftlm.errors import MediaError
from graftlm.media.limits import MediaLimits
from graftlm.shortening import shortened

__all__ = ["MediaSource", "read_local", "read_remote"]

#: A data URL, an http URL, base64 text, a path, the content of a file, a PIL image, or uint8 [H, W, 3].
MediaSource: TypeAlias = Any

_DATA: Final = "data:"
_SHOWN: Final = 60


def read_remote(text: object, limits: MediaLimits, download: Any) -> bytes:
    """Return the content of a picture file that a client sends: a data URL, base64 text, or an http(s) URL.

    Args:
        download: function from an http(s) URL to the content.

    Raises:
        MediaError: the text has another form, is too long, or names a host that is not allowed.
    """
    if not isinstance(text, str):
        raise MediaError(f"a picture is a data URL, base64 text or an http(s) URL, got {type(text).__name__}")
    if text[: len(_DATA)].lower() == _DATA:
        return _read_data_url(text, limits)
    scheme = text[:8].lower()
    if scheme.startswith(("http://", "https://")):
        content: bytes = download(text)
        return content
    if "://" in text[:64] or text[:5].lower() == "file:":
        raise MediaError(f"a picture's URL must start with data:, http:// or https://, got {shortened(text, _SHOWN)!r}")
    return _decode_base64(text, limits)


def read_local(source: MediaSource, limits: MediaLimits, download: Any) -> Any:
    """Return the content of a picture file, a PIL image or an array, from a form that a program in this process gives.

    Besides the forms of `read_remote`, these are paths, file contents, PIL images and arrays.

    Raises:
        MediaError: the source has another form, is too large, or cannot be read.
    """
    if isinstance(source, bytes | bytearray | memoryview):
        return bytes(source)
    if isinstance(source, Path):
        return _read_file(source, limits)
    if isinstance(source, str):
        if len(source) < 4096 and ":" not in source[2:8] and Path(source).is_file():
            return _read_file(Path(source), limits)
        return read_remote(source, limits, download)
    if hasattr(source, "convert") or hasattr(source, "__array__"):
        return source
    raise MediaError(f"a picture is a path, bytes, a data URL, a PIL image or an array, got {type(source).__name__}")


def _read_file(path: Path, limits: MediaLimits) -> bytes:
    try:
        if path.stat().st_size > limits.max_bytes:
            raise MediaError(
                f"{path} has {path.stat().st_size:,} bytes; the maximum set by media.max_bytes is {limits.max_bytes:,}"
            )
        return path.read_bytes()
    except OSError as error:
        raise MediaError(f"cannot read the picture {path}: {error.strerror or error}") from error


def _read_data_url(url: str, limits: MediaLimits) -> bytes:
    head, comma, _ = url[:256].partition(",")
    if not comma or not head.lower().endswith(";base64"):
        raise MediaError(f"a data URL must start with data:image/TYPE;base64, got {shortened(url, _SHOWN)!r}")
    kind = head[len(_DATA) :].split(";")[0].lower()
    if kind and not kind.startswith("image/"):
        raise MediaError(f"the data URL has the type {kind[:_SHOWN]!r}; only images are supported")
    return _decode_base64(url[len(head) + 1 :], limits)


def _decode_base64(text: str, limits: MediaLimits) -> bytes:
    if len(text) > (limits.max_bytes + 2) // 3 * 4 + 4096:  # room for line ends
        raise MediaError(
            f"the picture has about {len(text) * 3 // 4:,} bytes; the maximum set by media.max_bytes is "
            f"{limits.max_bytes:,}"
        )
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise MediaError(
            f"the picture is not valid base64: {error}; it starts with {shortened(text, _SHOWN)!r}"
        ) from error
