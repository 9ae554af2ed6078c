"""Waiting for a replica."""

import asyncio

import numpy as np
import pytest

from graftlm.errors import UnavailableError
from graftlm.processes.replicas import ReplicaSet
from graftlm.routing import Router

ROUTE = Router(1).route(np.arange(5, dtype=np.int32))


def make(can_recover=True, num=1):
    replicas = ReplicaSet([f"scheduler-{i}" for i in range(num)], can_recover)
    for replica in replicas.replicas:
        replicas.started(replica.name)
    return replicas


async def test_a_request_waits_for_a_replica_that_restarts():
    replicas = make()
    replicas.died("scheduler-0", "killed by SIGKILL")
    taking = asyncio.ensure_future(replicas.take(5, ROUTE))
    await asyncio.sleep(0)
    assert not taking.done()
    assert replicas.health.problems == ("scheduler-0 died: killed by SIGKILL",)
    replicas.started("scheduler-0")
    assert (await taking).name == "scheduler-0"
    assert replicas.health.ok


async def test_without_restart_a_request_fails_at_once_with_the_reason():
    replicas = make(can_recover=False)
    replicas.died("scheduler-0", "exit status 1")
    with pytest.raises(UnavailableError, match="scheduler-0 died: exit status 1"):
        await replicas.take(5, ROUTE)


async def test_other_replicas_continue_when_one_dies():
    replicas = make(can_recover=False, num=2)
    replicas.died("scheduler-0", "exit status 1")
    assert (await replicas.take(None, ROUTE)).name == "scheduler-1"
    assert replicas.health.ok
    assert replicas.health.problems == ("scheduler-0 died: exit status 1",)
    replicas.stuck("scheduler-1", 130)
    assert not replicas.health.ok


async def test_without_a_detokenizer_no_replica_is_available():
    replicas = make(can_recover=False, num=2)
    replicas.died("detokenizer", "killed by SIGKILL")
    with pytest.raises(UnavailableError, match="detokenizer died"):
        await replicas.take(None, ROUTE)


async def test_waiting_ends_when_the_restart_is_given_up():
    replicas = make()
    replicas.died("scheduler-0", "exit status 1")
    taking = asyncio.ensure_future(replicas.take(None, ROUTE))
    await asyncio.sleep(0)
    replicas.end_restarts()
    with pytest.raises(UnavailableError):
        await taking


async def test_waiting_ends_at_its_timeout():
    replicas = make()
    replicas.died("scheduler-0", "exit status 1")
    with pytest.raises(UnavailableError, match="scheduler-0 died"):
        await replicas.take(0.01, ROUTE)


async def test_requests_wait_during_a_pause():
    replicas = make()
    replicas.pause()
    taking = asyncio.ensure_future(replicas.take(None, ROUTE))
    await asyncio.sleep(0)
    assert not taking.done()
    replicas.resume()
    assert (await taking).name == "scheduler-0"


async def test_draining_refuses_new_and_waiting_requests():
    replicas = make()
    replicas.pause()
    taking = asyncio.ensure_future(replicas.take(None, ROUTE))
    await asyncio.sleep(0)
    replicas.drain()
    for refused in (taking, replicas.take(None, ROUTE)):
        with pytest.raises(UnavailableError, match="shutting down"):
            await refused
    assert not replicas.health.ok


def test_a_stuck_process_is_reported_until_it_continues():
    replicas = make()
    replicas.stuck("scheduler-0", 121.3)
    assert replicas.health.problems == ("scheduler-0 has not answered for 121 s",)
    replicas.recovered("scheduler-0")
    assert replicas.health.ok


def test_a_late_message_does_not_make_a_dead_process_healthy():
    replicas = make()
    replicas.died("scheduler-0", "exit status 1")
    replicas.recovered("scheduler-0")
    assert not replicas.health.ok


async def test_requests_wait_during_a_hold_even_after_a_pause_ends():
    replicas = make()
    replicas.hold()
    replicas.pause()
    taking = asyncio.ensure_future(replicas.take(None, ROUTE))
    replicas.resume()
    await asyncio.sleep(0)
    assert not taking.done()
    assert not replicas.health.paused
    replicas.release()
    assert (await taking).name == "scheduler-0"


async def test_an_outdated_replica_is_up_but_takes_no_requests_until_it_is_updated():
    replicas = make(num=2)
    replicas.mark_outdated("scheduler-0")
    assert [replica.name for replica in replicas.up] == ["scheduler-0", "scheduler-1"]
    assert (await replicas.take(None, ROUTE)).name == "scheduler-1"
    assert replicas.health.problems == ("scheduler-0 does not have the current weights: update them again",)
    assert replicas.health.ok
    replicas.mark_outdated("scheduler-1")
    assert not replicas.health.ok
    with pytest.raises(UnavailableError, match="scheduler-0 does not have the current weights: update them again; "):
        await replicas.take(None, ROUTE)
    replicas.hold()  # as during an update
    taking = asyncio.ensure_future(replicas.take(None, ROUTE))
    await asyncio.sleep(0)
    replicas.mark_current("scheduler-0")
    replicas.release()
    assert (await taking).name == "scheduler-0"
    assert replicas.health.ok


async def test_requests_wait_for_a_restarting_replica_instead_of_an_outdated_one():
    replicas = make(num=2)
    replicas.mark_outdated("scheduler-0")
    replicas.died("scheduler-1", "exit status 1")
    taking = asyncio.ensure_future(replicas.take(None, ROUTE))
    await asyncio.sleep(0)
    assert not taking.done()
    replicas.started("scheduler-1")
    assert (await taking).name == "scheduler-1"


def test_an_outdated_replica_that_dies_is_not_up():
    replicas = make(num=2)
    replicas.mark_outdated("scheduler-0")
    replicas.died("scheduler-0", "exit status 1")
    replicas.mark_current("scheduler-0")
    assert [replica.name for replica in replicas.up] == ["scheduler-1"]
