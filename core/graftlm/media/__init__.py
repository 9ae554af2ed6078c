"""Pictures in prompts: their sources, limits, decoding, identities, and places among the prompt's tokens."""

from graftlm.media.chats import NO_PICTURES, has_media, split_media
from graftlm.media.limits import MediaLimits
from graftlm.media.media_prompts import MediaPrompts, MediaTokens
from graftlm.media.request_media import MediaItem, RequestMedia
from graftlm.media.sources import MediaSource
from graftlm.media.wire import MediaOnWire, from_wire, to_wire

__all__ = [
    "NO_PICTURES",
    "MediaItem",
    "MediaLimits",
    "MediaOnWire",
    "MediaPrompts",
    "MediaSource",
    "MediaTokens",
    "RequestMedia",
    "from_wire",
    "has_media",
    "split_media",
    "to_wire",
]
