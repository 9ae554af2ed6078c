"""The table of unfinished prompts counts correctly in any order of endings."""

import numpy as np
import pytest

from graftlm.processes.generation import Generation, PreparedRequest
from graftlm.processes.in_flight import InFlight, InFlightRequests
from graftlm.processes.replicas import Replica
from graftlm.routing import Route
from graftlm.types import SamplingParams


@pytest.fixture
async def make():
    replica = Replica("scheduler-0")

    def item(name, num_tokens=3, n=1):
        request = PreparedRequest(name, np.zeros(num_tokens, dtype=np.int32), SamplingParams(n=n), seed=1)
        route = Route(request.prompt_token_ids, "", None, None)
        return InFlight(
            f"{name}:0", Generation(request, f"{name}:0", lambda generation: None), replica, route, arrived_s=0.0
        )

    return item


async def test_a_prompt_is_found_by_each_of_its_ids_until_it_is_removed(make):
    table, item = InFlightRequests(), make("a", n=2)
    table.add(item)
    assert table.by_prompt_id("a:0") is table.by_completion_id("a:0#0") is table.by_completion_id("a:0#1") is item
    assert table.by_request_id("a") is item
    assert "a" in table
    assert table.remove(item)
    assert not table.remove(item)
    assert (len(table), table.by_prompt_id("a:0"), table.by_completion_id("a:0#0"), table.by_request_id("a")) == (
        0,
        None,
        None,
        None,
    )


async def test_queued_tokens_are_counted_until_the_first_token_or_the_end(make):
    table, heard, unheard = InFlightRequests(), make("a", 10), make("b", 5)
    replica = heard.replica
    table.add(heard)
    table.add(unheard)
    assert (replica.queued_tokens, replica.num_requests) == (15, 2)
    table.first_token(heard, 1.0)
    assert replica.queued_tokens == 5
    table.remove(heard)
    table.remove(unheard)
    assert (replica.queued_tokens, replica.num_requests) == (0, 0)


async def test_the_table_may_change_during_an_iteration(make):
    table = InFlightRequests()
    for name in "abc":
        table.add(make(name))
    for item in table:
        table.remove(item)
    assert len(table) == 0
