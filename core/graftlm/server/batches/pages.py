"""Lists that clients read in pages."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from graftlm.server.errors import ApiError

__all__ = ["Page", "page_of"]


class _Item(Protocol):
    @property
    def id(self) -> str: ...


T = TypeVar("T", bound=_Item)


@dataclass(frozen=True, slots=True)
class Page(Generic[T]):
    """A part of a list.

    Attributes:
        has_more: whether the list continues after this page.
    """

    items: Sequence[T]
    has_more: bool

    @property
    def first_id(self) -> str | None:
        """The id of the first item; None if there is none."""
        return self.items[0].id if self.items else None

    @property
    def last_id(self) -> str | None:
        """The id of the last item; None if there is none."""
        return self.items[-1].id if self.items else None


def page_of(items: Sequence[T], limit: int, after: str | None) -> Page[T]:
    """Return the page of a list that begins after the item with the id `after`; None means the first page.

    Raises:
        ApiError: 400, the list does not contain the item.
    """
    if after is not None:
        place = next((i for i, item in enumerate(items) if item.id == after), None)
        if place is None:
            raise ApiError(400, f"after: there is no {after[:256]!r}", param="after")
        items = items[place + 1 :]
    return Page(items[:limit], len(items) > limit)
