"""The routing of requests to replicas: the router of the main process, and the reports of the scheduler processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from graftlm.contracts import RoutingContext, RoutingPolicy
from graftlm.hookspecs import hookimpl
from graftlm.processes.messages import CacheChanges
from graftlm.records import CacheEvent
from graftlm.registry.registry import AUTO
from graftlm.routing import BlockChange, BlockLedger, Router

if TYPE_CHECKING:
    from graftlm.config import EngineConfig
    from graftlm.registry import Registry

__all__ = ["CacheReporter", "changes_of", "make_router"]


def make_router(config: EngineConfig, registry: Registry) -> Router:
    """Return the router of a server's replicas. With one replica it has no policy.

    Raises:
        GraftlmError: the policy does not exist, or its options are wrong.
    """
    num_replicas, routing = config.parallel.data, config.parallel.routing
    if num_replicas == 1:
        return Router(1)
    if routing.name == AUTO:
        provider = next(iter(registry.available("routing_policy")), None)
        if provider is None:
            return Router(num_replicas)
    else:
        provider = registry.provider("routing_policy", routing.name)
    context = RoutingContext(num_replicas, config.cache.page_size)
    policy: RoutingPolicy = registry.create("routing_policy", provider, routing.options, context, config.origins)
    return Router(num_replicas, policy)


class CacheReporter:
    """A plugin that converts the cache's events to changes of blocks, which the router of the main process needs.

    The first report starts with "cleared", so that it replaces the reports of an earlier process of the same name.

    Args:
        block_tokens: number of tokens in a block.
        process: name of the replica's process.
    """

    def __init__(self, block_tokens: int, process: str) -> None:
        self._ledger = BlockLedger(block_tokens)
        self._process = process
        self._changes = [BlockChange("cleared")]

    @hookimpl
    def cache_event(self, event: CacheEvent) -> None:
        """Collect an event. This method is a hook."""
        change = self._ledger.apply(event)
        if change is not None:
            self._changes.append(change)

    def take(self) -> CacheChanges | None:
        """Return the changes since the last call as a message; None if there are none."""
        if not self._changes:
            return None
        changes = [
            (change.kind, np.array(change.digests, dtype=np.uint64).astype("<u8").tobytes()) for change in self._changes
        ]
        self._changes.clear()
        return CacheChanges(process=self._process, changes=changes)


def changes_of(message: CacheChanges) -> list[tuple[str, Sequence[int]]]:
    """Return the changes in a message, in the form that `Router.report` takes."""
    return [(kind, np.frombuffer(digests, "<u8").tolist()) for kind, digests in message.changes]
