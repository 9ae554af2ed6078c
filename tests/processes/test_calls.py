import asyncio

import pytest

from graftlm.errors import RequestError, UnavailableError
from graftlm.processes.calls import ProcessCalls
from graftlm.processes.messages import PING_ID, Call, Reply
from graftlm.processes.replicas import ReplicaSet

NAMES = ["scheduler-0", "scheduler-1"]


@pytest.fixture
def replicas():
    it = ReplicaSet(NAMES, can_recover=True)
    for name in (*NAMES, "detokenizer"):
        it.started(name)
    return it


@pytest.fixture
def sent():
    return []


@pytest.fixture
def calls(replicas, sent):
    return ProcessCalls(replicas, lambda name, message: sent.append((name, message)))


async def asked(coroutine):
    """Start a call, and run until it waits."""
    task = asyncio.ensure_future(coroutine)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    return task


def reply(calls, sent, i, **fields):
    name, message = sent[i]
    calls.answer(Reply(process=name, call_id=message.call_id, **fields))


async def test_every_call_gets_its_own_answer_even_if_answers_are_late(calls, sent):
    task = await asked(calls.call_schedulers("stats", limit=3))
    assert [name for name, _ in sent] == NAMES
    ids = {message.call_id for _, message in sent}
    assert len(ids) == 2
    assert PING_ID not in ids
    assert all(message == Call(call_id=message.call_id, name="stats", arguments={"limit": 3}) for _, message in sent)
    reply(calls, sent, 1, value="second")
    reply(calls, sent, 0, value="first")
    reply(calls, sent, 0, value="too late")
    assert await task == ["first", "second"]


async def test_a_refusal_is_raised_as_a_request_error(calls, sent):
    task = await asked(calls.call("scheduler-1", "start_profile"))
    reply(calls, sent, 0, error="one runs already")
    with pytest.raises(RequestError, match="one runs already"):
        await task


async def test_calls_to_a_dead_process_fail_and_others_wait(calls, sent):
    first, second = await asked(calls.call("scheduler-0", "x")), await asked(calls.call("scheduler-1", "x"))
    calls.process_died("scheduler-0", "scheduler-0 died")
    with pytest.raises(UnavailableError, match="scheduler-0 died"):
        await first
    assert not second.done()
    reply(calls, sent, 1, value=1)
    assert await second == 1


async def test_call_surviving_ignores_a_process_that_dies(calls, replicas, sent):
    task = await asked(calls.call_surviving("pause"))
    replicas.died("scheduler-0", "killed")
    calls.process_died("scheduler-0", "scheduler-0 died")
    reply(calls, sent, 1)
    assert await task is None


async def test_a_refusal_of_a_live_process_is_raised(calls, sent):
    task = await asked(calls.call_surviving("pause"))
    reply(calls, sent, 0, error="no")
    reply(calls, sent, 1)
    with pytest.raises(RequestError, match="no"):
        await task


async def test_a_call_without_a_live_replica_is_an_error(calls, replicas):
    for name in NAMES:
        replicas.died(name, "killed")
    with pytest.raises(UnavailableError):
        await calls.call_schedulers("stats")
