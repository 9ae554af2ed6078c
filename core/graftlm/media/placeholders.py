"""Placeholder ids: the tokens in a prompt that stand for a picture's features.

Each feature token gets an id below 0, which depends on the picture's content, on how it was prepared, and on the
feature's position in the picture. Prefix caches therefore share keys and values of equal pictures, and of no others.
"""

import hashlib
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from graftlm.contracts import Picture, PreparedMedia
from graftlm.types import TokenIds

__all__ = ["media_key", "picture_digest", "placeholder_ids"]

_IDS_PER_BLOCK: Final = 8  # a block of SHA-256 has 32 bytes, an id has 4
_SIGN: Final = np.uint32(0x80000000)


def picture_digest(picture: Picture) -> bytes:
    """Return 32 bytes that identify a picture's size and pixels."""
    digest = hashlib.sha256(f"{picture.shape}".encode())
    digest.update(np.ascontiguousarray(picture).data)
    return digest.digest()


def media_key(content: bytes, settings: bytes, prepared: PreparedMedia) -> bytes:
    """Return 32 bytes that identify a picture's features.

    Args:
        content: result of `picture_digest`.
        settings: `MediaProcessor.settings`.
        prepared: the prepared picture; its text and the shapes of its inputs are part of the key.
    """
    parts = (content, settings, prepared.text.encode(), _shapes(prepared.inputs).encode())
    digest = hashlib.sha256(b"graftlm media")
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()


def placeholder_ids(key: bytes, num_ids: int) -> TokenIds:
    """Return the placeholder ids of a picture, int32 [num_ids], all below 0: SHA-256 of the key and a counter."""
    num_blocks = -(-num_ids // _IDS_PER_BLOCK)
    blocks = [hashlib.sha256(key + block.to_bytes(8, "little")).digest() for block in range(num_blocks)]
    ids: NDArray[np.uint32] = np.frombuffer(b"".join(blocks), dtype="<u4")[:num_ids] | _SIGN
    return ids.astype(np.uint32).view(np.int32)


def _shapes(inputs: Mapping[str, NDArray[Any]]) -> str:
    return ", ".join(f"{name} {array.dtype} {array.shape}" for name, array in sorted(inputs.items()))
