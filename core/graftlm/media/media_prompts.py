"""Converts prompts with pictures to token ids with placeholder ids."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from graftlm.contracts import MediaProcessor, PreparedMedia
from graftlm.errors import InvalidPromptError, MediaError
from graftlm.media.chats import split_media
from graftlm.media.limits import MediaLimits
from graftlm.media.picture_store import PictureStore
from graftlm.media.placeholders import placeholder_ids
from graftlm.media.request_media import MediaItem, RequestMedia
from graftlm.media.sources import MediaSource, read_local, read_remote
from graftlm.tokenization import Tokenizer
from graftlm.types import Message, TokenIds

__all__ = ["MediaPrompts", "MediaTokens"]


@dataclass(frozen=True, slots=True)
class MediaTokens:
    """A tokenized prompt with pictures.

    Attributes:
        token_ids: int32 [n], with placeholder ids below 0 in place of feature tokens.
        media: the pictures.
    """

    token_ids: TokenIds
    media: RequestMedia


class MediaPrompts:
    """Tokenizes prompts with pictures. All methods may be called from several threads.

    Args:
        processor: prepares pictures for the model.
        tokenizer: the checkpoint's tokenizer.
        limits: limits of pictures.
        max_kept_bytes: maximum size in bytes of prepared pictures that are kept for later requests.
        is_local: whether prompts come from a program in this process, which may also give paths, bytes, PIL images and
            arrays.
        max_features: maximum number of feature tokens of one picture; None: no limit.
    """

    def __init__(
        self,
        processor: MediaProcessor,
        tokenizer: Tokenizer,
        limits: MediaLimits,
        max_kept_bytes: int,
        *,
        is_local: bool,
        max_features: int | None = None,
    ) -> None:
        self.limits = limits
        self.store = PictureStore(processor, limits, max_kept_bytes)
        self._processor = processor
        self._tokenizer = tokenizer
        self._max_features = max_features
        from graftlm.media.downloads import Downloads  # http and ssl, which only servers of pictures need

        read: Callable[..., Any] = read_local if is_local else read_remote
        downloads = Downloads(limits)
        self._read: Callable[[MediaSource], Any] = lambda source: read(source, limits, downloads)

    @property
    def has_chat_template(self) -> bool:
        """Whether the checkpoint has a chat template, in its tokenizer or in its processor."""
        return self._tokenizer.has_chat_template or self._processor.chat_template is not None

    def encode_chat(
        self,
        messages: Sequence[Message],
        template_args: Mapping[str, Any],
        check_text: Callable[[str], None] = lambda text: None,
    ) -> MediaTokens | TokenIds:
        """Return the tokens of a chat whose content parts may be pictures.

        Args:
            template_args: further variables of the chat template.
            check_text: function that raises an error for texts that are too long.

        Raises:
            InvalidPromptError: the chat template refuses the messages, or a text contains the marker of pictures.
            MediaError: a picture cannot be used.
        """
        tokenizer, args = self._tokenizer, dict(template_args)
        template = tokenizer.chat_template
        if not template and self._processor.chat_template is not None:
            template = args["chat_template"] = self._processor.chat_template
        marker = None if "image" in template else self._processor.marker
        split, sources = split_media(messages, marker, wraps_text=marker is None and "is string" not in template)
        text = tokenizer.apply_chat_template(split, **args)
        check_text(text)
        return self.encode_text(text, sources, add_special_tokens=False)

    def encode_text(
        self, text: str, sources: Sequence[MediaSource], *, add_special_tokens: bool = True
    ) -> MediaTokens | TokenIds:
        """Return the tokens of a text with one marker for each picture. If it has no markers, they are put before it.

        Raises:
            InvalidPromptError: the numbers of markers and pictures differ.
            MediaError: a picture cannot be used.
        """
        marker = self._processor.marker
        if not sources:
            return self._tokenizer.encode(text, add_special_tokens)
        num_markers = text.count(marker)
        if not num_markers:
            text, num_markers = marker * len(sources) + text, len(sources)
        self._check_number(num_markers, len(sources))
        found = [self._prepared(source) for source in sources]
        pieces = text.split(marker)
        whole = pieces[0] + "".join(
            prepared.text + piece for (_, prepared), piece in zip(found, pieces[1:], strict=True)
        )
        return self._placed(self._tokenizer.encode(whole, add_special_tokens), found)

    def encode_ids(
        self, token_ids: Sequence[int] | NDArray[Any], sources: Sequence[MediaSource]
    ) -> MediaTokens | TokenIds:
        """Return a prompt of token ids with its pictures; each marker in the prompt stands for one picture.

        Raises:
            InvalidPromptError: the numbers of markers and pictures differ.
            MediaError: a picture cannot be used.
        """
        ids = np.asarray(token_ids, dtype=np.int64)
        marker_ids = self._tokenizer.encode(self._processor.marker, add_special_tokens=False)
        places = np.flatnonzero(ids == int(marker_ids[0])) if len(marker_ids) == 1 else np.empty(0, dtype=np.int64)
        self._check_number(len(places), len(sources))
        found = [self._prepared(source) for source in sources]
        pieces = np.split(ids, places)
        joined: list[NDArray[Any]] = [pieces[0]]
        for (_, prepared), piece in zip(found, pieces[1:], strict=True):
            joined += [self._tokenizer.encode(prepared.text, add_special_tokens=False), piece[1:]]
        return self._placed(np.concatenate(joined), found)

    def _check_number(self, num_markers: int, num_sources: int) -> None:
        if num_sources > self.limits.max_items:
            raise MediaError(
                f"the request has {num_sources} pictures; the maximum set by media.max_items is {self.limits.max_items}"
            )
        if num_markers != num_sources:
            raise InvalidPromptError(
                f"the prompt has {num_markers} places for pictures ({self._processor.marker!r}) and {num_sources} "
                "pictures. A text may contain this marker only in the place of a picture."
            )

    def _prepared(self, source: MediaSource) -> tuple[MediaItem, PreparedMedia]:
        item, prepared = self.store.prepared(self._read(source))
        if self._max_features is not None and item.num_features > self._max_features:
            raise MediaError(
                f"the picture has {item.num_features} feature tokens, but the memory for features has room for "
                f"{self._max_features}. Send a smaller picture, or raise media.feature_bytes."
            )
        return item, prepared

    def _placed(self, token_ids: Any, found: Sequence[tuple[MediaItem, PreparedMedia]]) -> MediaTokens:
        """Replace the feature tokens by placeholder ids."""
        processor = self._processor
        token_ids = np.asarray(token_ids).astype(np.int32)
        items = [item for item, _ in found]
        positions = np.flatnonzero(token_ids == processor.feature_token_id)
        num_features = sum(item.num_features for item in items)
        if len(positions) != num_features:
            raise InvalidPromptError(
                f"the prompt has {len(positions)} feature tokens, but its pictures have {num_features} features. A "
                "text may not contain the names of the model's image tokens."
            )
        rope = processor.rope_positions(token_ids, [prepared for _, prepared in found])
        token_ids[positions] = np.concatenate([placeholder_ids(item.key, item.num_features) for item in items])
        media = RequestMedia(items, positions, processor.feature_token_id, rope, whole_runs=processor.attends_both_ways)
        return MediaTokens(token_ids, media)
