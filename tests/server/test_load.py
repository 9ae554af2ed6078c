"""Many concurrent clients, a third of which close their connections early."""

import asyncio
import json
import random

import aiohttp
import psutil
import pytest
import requests

from graftlm.testing.server_process import ServerProcess, wait_until

NUM_CLIENTS = 200
FEW_CLIENTS = 50  # for the quick set; still more than run at once


@pytest.fixture(scope="module")
def loaded_server():
    config = {
        "model": "demo",
        "memory": {"kv_tokens": 8192},
        "scheduling": {"max_running_requests": 48, "max_queued_requests": 400},
        "debug": True,  # with it, a page that a step loses is an error in the log and fails requests
    }
    with ServerProcess(config, environment={"OMP_NUM_THREADS": "1"}) as server:
        yield server


async def client(session, url, rng):
    """Stream one request, and possibly close it early; return the outcome."""
    prefix = "You are a helpful assistant. " * rng.randrange(1, 8)
    body = {
        "prompt": prefix + f"Question {rng.random()}: what is {rng.randrange(50)} plus {rng.randrange(50)}?",
        "max_tokens": rng.randrange(4, 40),
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": rng.choice([0, 0.8]),
    }
    leaves_after = rng.choice([0, 1, 3, 8]) if rng.random() < 1 / 3 else None
    num_events = 0
    async with session.post(url + "/v1/completions", json=body) as answer:
        if answer.status != 200:
            return f"status {answer.status}: {await answer.text()}"
        if leaves_after == 0:
            answer.close()
            return "left"
        async for line in answer.content:
            if not line.startswith(b"data: "):
                continue
            if line == b"data: [DONE]\n":
                return "done"
            event = json.loads(line[6:])
            if "error" in event:
                return f"error: {event}"
            num_events += 1
            if num_events == leaves_after:
                answer.close()
                return "left"
    return "cut off"


async def wave(url, seed, num_clients):
    rng = random.Random(seed)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(120)) as session:
        return await asyncio.gather(*[client(session, url, random.Random(rng.random())) for _ in range(num_clients)])


def load(url):
    return requests.get(url + "/server_info", timeout=10).json()


def metric(url, name):
    lines = requests.get(url + "/metrics", timeout=10).text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))


def resident_mib(server):
    main = psutil.Process(server.process.pid)
    return sum(p.memory_info().rss for p in [main, *main.children(recursive=True)]) / 2**20


@pytest.mark.parametrize("num_clients", [FEW_CLIENTS, pytest.param(NUM_CLIENTS, marks=pytest.mark.full)])
async def test_streaming_clients_that_close_early_lose_no_page(loaded_server, num_clients):
    url = loaded_server.url
    sizes = []
    for seed in range(3):
        outcomes = await wave(url, seed, num_clients)
        assert set(outcomes) == {"done", "left"}, [o for o in outcomes if o not in {"done", "left"}][:3]
        assert num_clients / 10 < outcomes.count("left") < num_clients * 0.55
        await asyncio.to_thread(
            wait_until, lambda: metric(url, "graftlm_running_requests") + metric(url, "graftlm_queued_requests") == 0
        )
        for state in ("owned", "locked"):
            assert metric(url, f'graftlm_kv_pages{{replica="scheduler-0",state="{state}"}}') == 0
        sizes.append(resident_mib(loaded_server))
    free, kept = (
        metric(url, f'graftlm_kv_pages{{replica="scheduler-0",state="{state}"}}') for state in ("free", "evictable")
    )
    assert free + kept == 8192
    assert sizes[-1] < sizes[1] * 1.05 + 10, sizes
    assert "error" not in loaded_server.log.lower(), [x for x in loaded_server.log.splitlines() if "rror" in x][:5]
