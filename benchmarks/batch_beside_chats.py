"""Measures the time to first token of chats, with and without a batch that runs at the same time.

python benchmarks/batch_beside_chats.py [--chats 40] [--rounds 3] [--max-running-beside 16]
"""

import argparse
import json
import statistics
import tempfile
import time
from typing import Any

import openai

from graftlm.testing.server_process import ServerProcess, wait_until


def first_token_s(client: openai.OpenAI, i: int) -> float:
    """Return the time to first token of a streamed chat, in seconds."""
    start_s = time.perf_counter()
    messages: Any = [{"role": "user", "content": f"What is {i % 10} plus {i % 7}? Think of {i} first."}]
    stream = client.chat.completions.create(model="demo", messages=messages, max_tokens=16, temperature=0, stream=True)
    seconds = [time.perf_counter() - start_s for _ in stream]
    return seconds[0]


def start_batch(client: openai.OpenAI, num_requests: int) -> str:
    """Start a batch, wait for its first answer and return its id."""
    question = {"messages": [{"role": "user", "content": "What is 2 plus 3?"}], "max_tokens": 64, "ignore_eos": True}
    lines = [
        {"custom_id": f"q{i}", "method": "POST", "url": "/v1/chat/completions", "body": question}
        for i in range(num_requests)
    ]
    content = "".join(json.dumps(line) + "\n" for line in lines).encode()
    file = client.files.create(file=("requests.jsonl", content), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
    wait_until(lambda: client.batches.retrieve(batch.id).request_counts.completed > 0, 60, "the first answer")
    return batch.id


def main() -> None:
    """Run the rounds and print the times."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chats", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-running-beside", type=int, default=None)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        server: dict[str, Any] = {"files": {"path": folder}}
        if arguments.max_running_beside is not None:
            server["batches"] = {"max_running_beside": arguments.max_running_beside}
        config = {"model": "demo", "memory": {"kv_tokens": 32768}, "server": server}
        with ServerProcess(config) as it, openai.OpenAI(base_url=it.url + "/v1", api_key="none") as client:
            times: dict[str, list[float]] = {"alone": [], "beside a batch": []}
            chats = iter(range(10_000))
            for _ in range(arguments.rounds):
                times["alone"] += [first_token_s(client, next(chats)) for _ in range(arguments.chats)]
                batch_id = start_batch(client, 5000)
                times["beside a batch"] += [first_token_s(client, next(chats)) for _ in range(arguments.chats)]
                done = client.batches.retrieve(batch_id).request_counts.completed
                client.batches.cancel(batch_id)
                wait_until(lambda: client.batches.retrieve(batch_id).status == "cancelled", 60, "the end")  # noqa: B023
                print(f"the batch had {done} answers")
    alone = statistics.median(times["alone"])
    for name, seconds in times.items():
        median = statistics.median(seconds)
        worst = statistics.quantiles(seconds, n=10)[-1]
        print(f"{name}: {1000 * median:.1f} ms median, {1000 * worst:.1f} ms 90 %, {median / alone:.2f} times")


if __name__ == "__main__":
    main()
