"""Executes a load plan: sends each request when it is due and the concurrency limit permits it."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from graftlm.bench.client import Client, PreparedRequest
from graftlm.bench.records import RequestRecord

__all__ = ["LoadObserver", "LoadPlan", "run_load"]


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """The requests of a run, and the times at which they are sent.

    Attributes:
        requests: the requests, in order of arrival.
        arrivals_s: due times in seconds since the start, float64 [requests]; None: all are due at the start.
        concurrency: maximum number of requests that run at the same time; None: no limit.
    """

    requests: Sequence[PreparedRequest]
    arrivals_s: NDArray[np.float64] | None = None
    concurrency: int | None = None

    def due_s(self, index: int) -> float | None:
        """Return the due time of a request in seconds; None in a closed loop, which has no due times."""
        if self.arrivals_s is not None:
            return float(self.arrivals_s[index])
        return 0.0 if self.concurrency is None else None


@dataclass(frozen=True, slots=True)
class LoadObserver:
    """Functions that are called when a request starts and ends. They must not block.

    Attributes:
        sent: called when a request is sent.
        ended: called with the record of a request that has ended.
    """

    sent: Callable[[], None] = lambda: None
    ended: Callable[[RequestRecord], None] = lambda record: None


async def run_load(
    client: Client,
    plan: LoadPlan,
    observer: LoadObserver | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> list[RequestRecord]:
    """Send all requests of a plan and wait until all have ended.

    Slow answers delay other requests only if `concurrency` is set. With this limit, due requests wait in the client, in
    order, and their records contain the waiting time.

    Returns: a record for each request, in the plan's order.
    """
    observer = observer or LoadObserver()
    slots = None if plan.concurrency is None else asyncio.Semaphore(plan.concurrency)
    start_s = clock()

    async def make(request: PreparedRequest, due_s: float | None) -> RequestRecord:
        observer.sent()
        try:
            record = await client.send(request, start_s, due_s)
        finally:
            if slots is not None:
                slots.release()
        observer.ended(record)
        return record

    tasks = []
    async with asyncio.TaskGroup() as group:
        for index, request in enumerate(plan.requests):
            due_s = plan.due_s(index)
            wait_s = 0.0 if due_s is None else start_s + due_s - clock()
            if wait_s > 0:
                await asyncio.sleep(wait_s)
            if slots is not None:
                await slots.acquire()
            tasks.append(group.create_task(make(request, due_s)))
    return [task.result() for task in tasks]
