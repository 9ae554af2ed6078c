"""The walk of the radix tree of waiting requests, depth first."""

from collections.abc import Callable, Sequence
from typing import TypeAlias

from graftlm.contracts import PrefixGroup, WaitingRequest

__all__ = ["Rank", "ranks_on_the_way"]

#: What sorts groups and requests that share the same with each other; of one length in one walk, lowest first.
Rank: TypeAlias = tuple[int, ...]


def ranks_on_the_way(
    waiting: Sequence[WaitingRequest],
    rank_group: Callable[[PrefixGroup, int], Rank],
    rank_request: Callable[[WaitingRequest, int], Rank],
) -> list[Rank]:
    """Return, for each request, the ranks from its largest group down to itself: sorting by them walks depth first.

    Args:
        rank_group: rank of a group, given the index of its first member. Different ones need different ranks, or their
            members mix.
        rank_request: rank of a request, given its index, among the groups and requests it stands beside.
    """
    ways: dict[PrefixGroup | None, Rank] = {None: ()}
    ranks = []
    for idx, request in enumerate(waiting):
        group = request.group
        way = ways.get(group)
        if way is None:
            way = _add_way(ways, group, idx, rank_group)
        ranks.append(way + rank_request(request, idx))
    return ranks


def _add_way(
    ways: dict[PrefixGroup | None, Rank],
    group: PrefixGroup | None,
    first: int,
    rank_group: Callable[[PrefixGroup, int], Rank],
) -> Rank:
    """Note the ranks down to a group of which nobody has come yet, and to the groups around it; return the former."""
    missing = []
    while group is not None and group not in ways:
        missing.append(group)
        group = group.parent
    way = ways[group]
    for step in reversed(missing):
        way = ways[step] = way + rank_group(step, first)
    return way
