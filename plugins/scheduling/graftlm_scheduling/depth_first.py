"""Computes the depth-first order of the radix tree of waiting requests."""

from collections.abc import Callable, Sequence
from typing import TypeAlias

from graftlm.contracts import PrefixGroup, WaitingRequest

__all__ = ["Rank", "depth_first_ranks"]

#: Sort key that is compared among the groups and requests with one parent group; the lowest comes first. All ranks in
#: one order have the same length.
Rank: TypeAlias = tuple[int, ...]


def depth_first_ranks(
    waiting: Sequence[WaitingRequest],
    rank_group: Callable[[PrefixGroup, int], Rank],
    rank_request: Callable[[WaitingRequest, int], Rank],
) -> list[Rank]:
    """Return sort keys that put the requests in depth-first order.

    The key of a request is the concatenation of the ranks of its groups, largest group first, and of its own rank.

    Args:
        waiting: the waiting requests.
        rank_group: function that returns the rank of a group, given the index of its first member. Groups with the same
            parent need different ranks, otherwise their members are mixed.
        rank_request: function that returns the rank of a request, given its index. This rank is compared with the ranks
            of groups and requests with the same parent.
    """
    paths: dict[PrefixGroup | None, Rank] = {None: ()}
    ranks = []
    for idx, request in enumerate(waiting):
        group = request.group
        path = paths.get(group)
        if path is None:
            path = _add_path(paths, group, idx, rank_group)
        ranks.append(path + rank_request(request, idx))
    return ranks


def _add_path(
    paths: dict[PrefixGroup | None, Rank],
    group: PrefixGroup | None,
    first: int,
    rank_group: Callable[[PrefixGroup, int], Rank],
) -> Rank:
    """Add the paths of a group and its ancestors to `paths` if they are missing. Returns the group's path.

    A group's path is the concatenation of the ranks of its ancestors and of its own rank.
    """
    missing = []
    while group is not None and group not in paths:
        missing.append(group)
        group = group.parent
    path = paths[group]
    for step in reversed(missing):
        path = paths[step] = path + rank_group(step, first)
    return path
