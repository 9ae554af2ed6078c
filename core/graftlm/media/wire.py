"""The pictures of a request in messages between processes."""

from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from graftlm.media.request_media import MediaItem, RequestMedia

__all__ = ["MediaOnWire", "from_wire", "to_wire"]


class _Array(msgspec.Struct, frozen=True, array_like=True):
    dtype: str
    shape: list[int]
    data: memoryview

    @classmethod
    def of(cls, array: NDArray[Any]) -> "_Array":
        return cls(array.dtype.str, list(array.shape), np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)

    def array(self) -> NDArray[Any]:
        return np.frombuffer(self.data, dtype=np.dtype(self.dtype)).reshape(self.shape)


class _Item(msgspec.Struct, frozen=True, array_like=True):
    key: bytes
    num_features: int
    inputs: dict[str, _Array]


class MediaOnWire(msgspec.Struct, frozen=True, array_like=True):
    """A `RequestMedia` in a message. Its arrays are views of the sender's arrays or of the received message."""

    items: list[_Item]
    positions: _Array
    feature_token_id: int
    rope_positions: _Array | None
    whole_runs: bool


def to_wire(media: RequestMedia) -> MediaOnWire:
    """Return pictures in the form of messages."""
    return MediaOnWire(
        [
            _Item(item.key, item.num_features, {name: _Array.of(array) for name, array in item.inputs.items()})
            for item in media.items
        ],
        _Array.of(media.positions),
        media.feature_token_id,
        None if media.rope_positions is None else _Array.of(media.rope_positions),
        media.whole_runs,
    )


def from_wire(wire: MediaOnWire) -> RequestMedia:
    """Return pictures from a message; their arrays are read-only views of the message."""
    items = [
        MediaItem(item.key, item.num_features, {name: array.array() for name, array in item.inputs.items()})
        for item in wire.items
    ]
    rope = None if wire.rope_positions is None else wire.rope_positions.array()
    return RequestMedia(items, wire.positions.array(), wire.feature_token_id, rope, whole_runs=wire.whole_runs)
