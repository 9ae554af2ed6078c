"""A generation gives its reader every update once and in order, and then its end or its error."""

import asyncio

import numpy as np
import pytest

from graftlm.errors import RequestError, RequestFailedError, RequestTimeoutError, UnavailableError
from graftlm.processes.generation import Generation, PreparedRequest
from graftlm.scheduling import Failure, Finish, RequestUpdate
from graftlm.types import FinishReason, SamplingParams, TokenLogprob, Usage


def make(n=1):
    aborted = []
    request = PreparedRequest("mine", np.array([5, 6], dtype=np.int32), SamplingParams(n=n), seed=1)
    return Generation(request, "mine:7", aborted.append), aborted


def token(completion_id, token_id, **more):
    return RequestUpdate(completion_id, (token_id,), (TokenLogprob(token_id, -0.5),), **more)


STOP = {"finish": Finish(FinishReason.STOP, matched_stop=9), "usage": Usage(2, 2, 0)}


async def read(generation):
    return [delta async for deltas in generation for delta in deltas]


async def test_updates_that_arrive_together_are_one_delta_per_completion():
    generation, _ = make(n=2)
    for i in range(3):
        generation.apply(token("mine:7#0", i), "ab"[i % 2])
        generation.apply(token("mine:7#1", 10 + i), "c")
    first = await anext(generation)
    assert [(d.index, d.text, d.token_ids) for d in first] == [(0, "aba", (0, 1, 2)), (1, "ccc", (10, 11, 12))]
    assert [len(d.logprobs) for d in first] == [3, 3]
    generation.apply(token("mine:7#1", 13, **STOP), "d")
    generation.apply(token("mine:7#0", 3), "e")
    generation.apply(token("mine:7#0", 4, **STOP), "f")
    rest = await read(generation)
    assert [(d.index, d.text, d.finish_reason, d.matched_stop) for d in rest] == [
        (1, "d", FinishReason.STOP, 9),
        (0, "ef", FinishReason.STOP, 9),
    ]
    assert [c.text for c in generation.snapshot().completions] == ["abaef", "cccd"]
    assert generation.snapshot().request_id == "mine"
    assert generation.finished
    assert generation.outcome == "stop"


async def test_a_reader_waits_for_updates():
    generation, _ = make()
    reading = asyncio.ensure_future(read(generation))
    await asyncio.sleep(0)
    generation.apply(token("mine:7", 1), "a")
    await asyncio.sleep(0)
    generation.apply(token("mine:7", 2, **STOP), "b")
    assert "".join(delta.text for delta in await reading) == "ab"


@pytest.mark.parametrize(
    ("finish", "error", "outcome"),
    [
        (Finish(FinishReason.ERROR, error="no", failure=Failure.REQUEST), RequestError, "request"),
        (Finish(FinishReason.ERROR, error="no", failure=Failure.ENGINE), RequestFailedError, "engine"),
        (Finish(FinishReason.ABORT, error="late", failure=Failure.TIMEOUT), RequestTimeoutError, "timeout"),
    ],
)
async def test_a_failure_is_raised_after_the_earlier_updates(finish, error, outcome):
    generation, _ = make()
    generation.apply(token("mine:7", 1), "a")
    generation.apply(RequestUpdate("mine:7", finish=finish, usage=Usage(2, 1, 0)), "")
    assert (await anext(generation))[0].text == "a"
    for _ in range(2):
        with pytest.raises(error, match=finish.error):
            await anext(generation)
    assert (generation.outcome, generation.failed, generation.finished) == (outcome, True, True)


async def test_an_explicit_abort_is_an_end_without_an_error():
    generation, aborted = make()
    generation.abort()
    assert aborted == [generation]
    finish = Finish(FinishReason.ABORT, error="aborted")
    generation.apply(RequestUpdate("mine:7", finish=finish, usage=Usage(2, 0, 0)), "")
    assert (await generation.result()).finish_reason is FinishReason.ABORT
    generation.abort()
    assert aborted == [generation]  # an ended generation is not aborted again


async def test_any_first_update_means_that_the_request_is_accepted():
    generation, _ = make()
    generation.apply(token("mine:7", 1, **STOP), "a")
    await asyncio.wait_for(generation.accepted, 1)


async def test_the_death_of_a_process_ends_all_waits():
    generation, _ = make()
    waiting, reading = (
        asyncio.ensure_future(asyncio.shield(generation.accepted)),
        asyncio.ensure_future(read(generation)),
    )
    await asyncio.sleep(0)
    generation.fail(UnavailableError("scheduler-0 died"))
    generation.fail(UnavailableError("a second reason does not count"))
    for task in (waiting, reading):
        with pytest.raises(UnavailableError, match="scheduler-0 died"):
            await task
    generation.apply(token("mine:7", 1), "late")
    assert generation.snapshot().text == ""


async def test_a_cancelled_read_loses_no_updates():
    generation, _ = make()
    reading = asyncio.ensure_future(anext(generation))
    await asyncio.sleep(0)
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    generation.apply(token("mine:7", 1, **STOP), "a")
    assert (await generation.result()).text == "a"
