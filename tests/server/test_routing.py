"""A server with two replicas finds as many cached tokens as the simulation of its recorded requests."""

import random
import re
from concurrent.futures import ThreadPoolExecutor

import httpx2
import pytest

from graftlm.cache_sim import Choice, parse_capacities, read_trace
from graftlm.config import PluginSettings
from graftlm.registry import Registry
from graftlm.route_sim import ReplicaLimits, RouteFigures, RouteStudy
from graftlm.testing.server_process import ServerProcess, wait_until

PAGE_SIZE, KV_TOKENS, NUM_CHATS, NUM_TURNS, NUM_CLIENTS = 16, 16_384, 64, 6, 4


def chat(client, seed):
    """Generate the turns of a chat; each prompt is the previous prompt, its output and new tokens.

    Yields: (number of prompt tokens, number of cached tokens) of each turn.
    """
    draw, system = random.Random(seed), random.Random(0)
    prompt = [system.randrange(10, 2000) for _ in range(70)]
    for _ in range(NUM_TURNS):
        prompt = prompt + [draw.randrange(10, 2000) for _ in range(draw.randrange(20, 150))]
        params = {"max_new_tokens": draw.randrange(4, 24), "temperature": 0, "ignore_eos": True}
        answer = client.post("/generate", json={"input_ids": prompt, "sampling_params": params})
        assert answer.status_code == 200, answer.text
        body = answer.json()
        yield len(prompt), body["meta_info"]["cached_tokens"]
        prompt = prompt + body["output_ids"]


def converse(client, seeds):
    """Run some chats in turns, as one client that has several open chats; return the pairs of all turns."""
    return [pair for turns in zip(*[chat(client, seed) for seed in seeds], strict=True) for pair in turns]


@pytest.mark.full
def test_two_replicas_agree_with_the_simulation_within_two_points(tmp_path):
    policy, options = "cache_aware", {"block_tokens": PAGE_SIZE}
    trace_path = tmp_path / "trace.jsonl"
    config = {
        "cache": {"page_size": PAGE_SIZE},
        "memory": {"kv_tokens": KV_TOKENS},
        "parallel": {"data": 2, "routing": {"name": policy, "options": options}},
        "server": {"record_trace": str(trace_path)},
    }
    with ServerProcess(config) as server, httpx2.Client(base_url=server.url, timeout=120) as client:
        with ThreadPoolExecutor(NUM_CLIENTS) as pool:
            work = [pool.submit(converse, client, range(first, NUM_CHATS, NUM_CLIENTS)) for first in range(NUM_CLIENTS)]
            pairs = [pair for one in work for pair in one.result()]
        wait_until(lambda: trace_path.read_text().count("\n") == NUM_CHATS * NUM_TURNS, what="the recorded trace")
    num_prompt, num_cached = (sum(column) for column in zip(*pairs, strict=True))
    study = RouteStudy(
        Registry.load(PluginSettings()),
        [Choice(policy, options)],
        [2],
        Choice("radix"),
        Choice("lru"),
        parse_capacities([str(KV_TOKENS)])[0],
        limits=ReplicaLimits(),
    )
    trace = read_trace(trace_path)
    (fleet,) = study.run(trace).fleets
    simulated = RouteFigures.of(fleet.outcomes[0], fleet).hit_rate
    print(f"server {num_cached / num_prompt:.2%}, simulation {simulated:.2%}")
    assert trace.prompt_tokens == num_prompt
    assert simulated > 0.9 * fleet.one_cache_hit_tokens / num_prompt
    assert num_cached / num_prompt == pytest.approx(simulated, abs=0.02)


@pytest.mark.full
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
def test_requests_with_the_same_key_reach_the_same_replica(two_replicas, path):
    client, counts = two_replicas
    before = counts()
    for number in range(6):
        field = {"messages": [{"role": "user", "content": f"{number}"}], "max_completion_tokens": 1}
        if path == "/v1/responses":
            field = {"input": f"{number} {number}", "max_output_tokens": 1}
        answer = client.post(path, json={"model": "demo", "prompt_cache_key": "user 1", **field})
        assert answer.status_code == 200, answer.text
    wait_until(lambda: sum(counts()) == sum(before) + 6, what="the reports of the replicas")
    assert sorted(new - old for old, new in zip(before, counts(), strict=True)) == [0, 6]


@pytest.fixture(scope="module")
def two_replicas():
    """A client of a server with `consistent_hash`, and a function that counts the tokens of each replica."""
    config = {"memory": {"kv_tokens": 2048}, "parallel": {"data": 2, "routing": "consistent_hash"}}
    with ServerProcess(config) as server, httpx2.Client(base_url=server.url, timeout=60) as client:

        def counts():
            found = re.findall(
                r'^graftlm_generated_tokens_total{replica="scheduler-(\d)"} (\S+)$', metrics(), re.MULTILINE
            )
            return [float(dict(found).get(number, 0)) for number in "01"]

        def metrics():
            return client.get("/metrics").text

        yield client, counts
