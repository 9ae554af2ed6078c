"""Scheduling policies that come with graftlm: `lpm` and `fcfs`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from graftlm import Provider, hookimpl
from graftlm_scheduling.lpm import LongestPrefixMatchOptions

if TYPE_CHECKING:
    from graftlm.contracts import NoOptions, SchedulingContext, SchedulingPolicy

__all__ = ["provide_scheduling_policies"]


def _create_fcfs(options: NoOptions, context: SchedulingContext) -> SchedulingPolicy:
    from graftlm_scheduling.fcfs import FirstComeFirstServed

    return FirstComeFirstServed()


def _create_lpm(options: LongestPrefixMatchOptions, context: SchedulingContext) -> SchedulingPolicy:
    from graftlm_scheduling.lpm import LongestPrefixMatch

    return LongestPrefixMatch(options)


@hookimpl
def provide_scheduling_policies() -> list[Provider[SchedulingPolicy]]:
    """Offer the built-in policies."""
    return [
        Provider(
            name="lpm",
            summary="Longest cached prefix first",
            api_version=1,
            create=_create_lpm,
            options=LongestPrefixMatchOptions,
            rank=10,
        ),
        Provider(
            name="fcfs",
            summary="First come, first served",
            api_version=1,
            create=_create_fcfs,
        ),
    ]
