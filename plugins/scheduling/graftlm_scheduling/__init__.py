"""The built-in scheduling policies: `lpm`, `dfs_weight`, `fcfs`, `lof`, `priority` and `random`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from graftlm import Provider, hookimpl
from graftlm_scheduling.options import PreemptivePriorityOptions, RandomOrderOptions, ReorderingOptions

if TYPE_CHECKING:
    from graftlm.contracts import NoOptions, SchedulingContext, SchedulingPolicy

__all__ = ["provide_scheduling_policies"]


def _create_lpm(options: ReorderingOptions, context: SchedulingContext) -> SchedulingPolicy:
    from graftlm_scheduling.lpm import LongestPrefixMatch

    return LongestPrefixMatch(options)


def _create_dfs_weight(options: ReorderingOptions, context: SchedulingContext) -> SchedulingPolicy:
    from graftlm_scheduling.dfs_weight import DepthFirstByWeight

    return DepthFirstByWeight(options)


def _create_fcfs(options: NoOptions, context: SchedulingContext) -> SchedulingPolicy:
    from graftlm_scheduling.fcfs import FirstComeFirstServed

    return FirstComeFirstServed()


def _create_lof(options: ReorderingOptions, context: SchedulingContext) -> SchedulingPolicy:
    from graftlm_scheduling.lof import LongestOutputFirst

    return LongestOutputFirst(options)


def _create_priority(options: PreemptivePriorityOptions, context: SchedulingContext) -> SchedulingPolicy:
    from graftlm_scheduling.priority import PreemptivePriority

    return PreemptivePriority(options)


def _create_random(options: RandomOrderOptions, context: SchedulingContext) -> SchedulingPolicy:
    from graftlm_scheduling.random_order import RandomOrder

    return RandomOrder(options, context.seed)


@hookimpl
def provide_scheduling_policies() -> list[Provider[SchedulingPolicy]]:
    """Return the providers of the built-in policies."""
    return [
        Provider(
            name="lpm",
            summary="Longest cached prefix first; requests that share a prefix one after the other",
            api_version=1,
            create=_create_lpm,
            options=ReorderingOptions,
            rank=10,
        ),
        Provider(
            name="dfs_weight",
            summary="Depth first through the tree of shared prefixes, branches with most waiting requests first",
            api_version=1,
            create=_create_dfs_weight,
            options=ReorderingOptions,
        ),
        Provider(
            name="fcfs",
            summary="First come, first served",
            api_version=1,
            create=_create_fcfs,
        ),
        Provider(
            name="lof",
            summary="Longest output first",
            api_version=1,
            create=_create_lof,
            options=ReorderingOptions,
        ),
        Provider(
            name="priority",
            summary="First come, first served by priority; requests of higher priority can replace running ones",
            api_version=1,
            create=_create_priority,
            options=PreemptivePriorityOptions,
        ),
        Provider(
            name="random",
            summary="A new random order in every step, as a baseline",
            api_version=1,
            create=_create_random,
            options=RandomOrderOptions,
        ),
    ]
