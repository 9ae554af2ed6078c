"""A drafter that records the drafts of another one."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from graftlm.contracts import Draft, Drafter, DraftRequest, Provider
from graftlm.hookspecs import hookimpl
from graftlm.records import CacheEvent

__all__ = ["RecordedDrafter", "RecordedDrafters"]


class RecordedDrafter(Drafter):
    """A wrapper of a drafter. It does not declare costs, so the number of its calls hardly depends on measured times.

    Attributes:
        seen: token ids of each request with a draft, and the draft's token ids, in order.
    """

    def __init__(self, inner: Drafter) -> None:
        self.seen: list[tuple[list[int], list[int]]] = []
        self._inner = inner

    @property
    def drafts_ahead(self) -> bool:
        """That of the wrapped drafter."""
        return self._inner.drafts_ahead

    @property
    def num_page_tokens(self) -> int:
        """That of the wrapped drafter."""
        return self._inner.num_page_tokens

    def propose(self, requests: Sequence[DraftRequest]) -> Sequence[Draft | None]:
        """Return the drafts of the wrapped drafter, and record them."""
        texts = [request.token_ids.tolist() for request in requests]
        drafts = self._inner.propose(requests)
        self.seen += [
            (text, draft.token_ids.tolist()) for text, draft in zip(texts, drafts, strict=True) if draft is not None
        ]
        return drafts

    def cache_event(self, event: CacheEvent) -> None:
        """Pass the event to the wrapped drafter."""
        self._inner.cache_event(event)

    def close(self, row: int) -> None:
        """Close the row in the wrapped drafter."""
        self._inner.close(row)


class RecordedDrafters:
    """A plugin that provides a drafter under the name `recorded`, which records the drafts of another provider's one.

    Args:
        provider: the provider of the wrapped drafter.

    Attributes:
        drafter: the drafter that was created last; None before.
    """

    def __init__(self, provider: Provider[Drafter]) -> None:
        self.drafter: RecordedDrafter | None = None
        self._provider = provider

    @hookimpl
    def provide_drafters(self) -> list[Provider[Drafter]]:
        """Return the provider of `recorded`, with the options of the wrapped drafter."""

        def create(options: Any, context: Any) -> Drafter:
            self.drafter = RecordedDrafter(self._provider.create(options, context))
            return self.drafter

        return [replace(self._provider, name="recorded", create=create)]
