"""Kills a server with SIGKILL while it answers a batch, and checks that each request has one answer.

python tests/server/batch_kills.py [--requests 2000] [--kills 5] [--seed 0]
"""

import argparse
import json
import random
import sys
import tempfile
import time

import openai
from rich.console import Console

from graftlm.testing.server_process import ServerProcess, wait_until

ENDED = {"completed", "failed", "expired", "cancelled"}


def requests_of(count):
    """Return the lines of an input: short greedy chats."""
    return [
        {
            "custom_id": f"q{i}",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {
                "messages": [{"role": "user", "content": f"What is {i % 10} plus {i % 7}?"}],
                "temperature": 0,
                "max_tokens": 12,
            },
        }
        for i in range(count)
    ]


def start_server(folder):
    config = {"model": "demo", "memory": {"kv_tokens": 16384}, "server": {"files": {"path": folder}}}
    return ServerProcess(config, environment={"OMP_NUM_THREADS": "1"})


def client_of(server):
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)


def num_answered(client, batch_id):
    counts = client.batches.retrieve(batch_id).request_counts
    return counts.completed + counts.failed


def run_batch(num_requests, num_kills, seed, report=print):
    """Answer a batch under kills; returns the results, and by how many requests each server came further."""
    rng = random.Random(seed)
    lines = requests_of(num_requests)
    content = "".join(json.dumps(line) + "\n" for line in lines).encode()
    # Each server is killed after a random part of what is left, and before the end.
    batch_id, steps = None, []
    with tempfile.TemporaryDirectory(prefix="graftlm-batch-") as folder:
        for kill in range(num_kills + 1):
            with start_server(folder) as server, client_of(server) as client:
                if batch_id is None:
                    file = client.files.create(file=("requests.jsonl", content), purpose="batch")
                    endpoint = "/v1/chat/completions"
                    batch = client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h")
                    batch_id = batch.id
                before = sum(steps)
                if kill == num_kills:
                    wait_until(lambda: client.batches.retrieve(batch_id).status in ENDED, 900, "the end")  # noqa: B023
                    batch = client.batches.retrieve(batch_id)
                    results = [
                        json.loads(line) for line in client.files.content(batch.output_file_id).text.splitlines()
                    ]
                    steps.append(len(results) - before)
                    return batch, results, steps
                left = num_requests - before
                goal = before + rng.randint(1, max(1, left // (num_kills + 1 - kill)))
                wait_until(lambda: num_answered(client, batch_id) >= goal, 900, "enough answers")  # noqa: B023
                time.sleep(rng.random() / 20)
                server.process.kill()
                server.process.wait()
                steps.append(goal - before)
                report(f"killed after about {goal} of {num_requests} answers")
    raise AssertionError


def check(batch, results, num_requests):
    """Return what is wrong with the results of a batch; nothing if each request has one answer."""
    ids = [result["custom_id"] for result in results]
    wrong = []
    if batch.status != "completed":
        wrong.append(f"the batch is {batch.status}")
    if len(ids) != len(set(ids)):
        wrong.append(f"{len(ids) - len(set(ids))} requests are answered twice")
    if set(ids) != {f"q{i}" for i in range(num_requests)}:
        wrong.append(f"{num_requests - len(set(ids))} requests have no answer")
    texts = {}
    for result in results:
        i = int(result["custom_id"][1:])
        text = result["response"]["body"]["choices"][0]["message"]["content"]
        texts.setdefault((i % 10, i % 7), set()).add(text)
    if any(len(answers) > 1 for answers in texts.values()):
        wrong.append("one question has different answers")
    return wrong


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    console = Console()
    start_s = time.monotonic()
    batch, results, _ = run_batch(arguments.requests, arguments.kills, arguments.seed, console.print)
    wrong = check(batch, results, arguments.requests)
    console.print(
        f"{len(results)} answers to {arguments.requests} requests, {arguments.kills} kills, "
        f"{time.monotonic() - start_s:.0f} s: {', '.join(wrong) or 'each request has one answer'}"
    )
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
