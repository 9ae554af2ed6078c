"""Runs SGLang's routers in front of two servers, with several policies; a worker is killed and comes back.

    python tests/clients/routers.py sglang-router --python build/clients/sglang_router/bin/python
    python tests/clients/routers.py smg --python build/clients/smg/bin/python

With each policy, requests to the router must get the answers of the servers. Then a worker is killed with SIGKILL
while requests run: each of them is answered by the other one. The worker starts again at its port, and the router
sends it requests again.
"""

import argparse
import contextlib
import json
import re
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import httpx2
import openai

from graftlm.testing.server_process import ServerProcess, wait_until

#: The arguments that start each router, and its policies.
ROUTERS: Final = {
    "sglang-router": (["sglang_router.launch_router"], ("round_robin", "cache_aware", "power_of_two")),
    "smg": (["smg", "launch"], ("round_robin", "cache_aware", "power_of_two", "least_load", "consistent_hashing")),
}
QUESTION: Final = "What is 2 plus 3?"
ANSWER: Final = "2 + 3 = 5."
CHAT: Final = {"model": "demo", "messages": [{"role": "user", "content": QUESTION}], "temperature": 0}
GENERATE: Final = {"text": "One, two,", "sampling_params": {"max_new_tokens": 8, "temperature": 0}}
EMBED: Final = {"model": "demo", "input": ["a fox", "a dog"]}


def free_port() -> int:
    """Return a port that is free now."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def serve(port: int) -> ServerProcess:
    """Start a worker at a port."""
    config = {"model": "demo", "memory": {"kv_tokens": 16384}, "server": {"port": port, "model_names": ["unknown"]}}
    return ServerProcess(config, environment={"OMP_NUM_THREADS": "1"}, timeout_s=600)


@contextlib.contextmanager
def router(command: list[str], workers: list[str], policy: str, log: Path) -> Iterator[str]:
    """Run the router until the end of the block; returns its URL."""
    port = free_port()
    command = [*command, "--host", "127.0.0.1", "--port", str(port)]
    command += ["--prometheus-port", str(free_port()), "--policy", policy, "--worker-urls", *workers]
    command += ["--health-check-interval-secs", "1", "--health-failure-threshold", "1"]
    command += ["--health-success-threshold", "1", "--cb-timeout-duration-secs", "1"]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until(lambda: process.poll() is not None or is_ready(url), 60, "the router")
        assert process.poll() is None, log.read_text()[-2000:]
        yield url
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def is_ready(url: str) -> bool:
    """Return whether the router has a healthy worker."""
    try:
        return httpx2.get(f"{url}/readiness", timeout=2).status_code == 200
    except httpx2.HTTPError:
        return False


def num_answered(worker: str) -> int:
    """Return how many requests a worker has finished."""
    text = httpx2.get(f"{worker}/metrics", timeout=30).text
    counts = re.findall(r"^graftlm_requests_finished_total\{.*\} ([\d.e+]+)$", text, re.MULTILINE)
    return int(sum(float(count) for count in counts))


def check_routes(url: str, worker: str) -> None:
    """Check that the router's answers are those of a worker."""
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        assert client.chat.completions.create(**CHAT).choices[0].message.content == ANSWER
        chunks = client.chat.completions.create(**CHAT, stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == ANSWER
        fields = {"model": "demo", "prompt": "One, two,", "temperature": 0, "max_tokens": 8}
        text = client.completions.create(**fields).choices[0].text
    answers = [httpx2.post(f"{base}/generate", json=GENERATE, timeout=60) for base in (url, worker)]
    assert [answer.json()["text"] for answer in answers] == [text, text], [answer.text for answer in answers]
    embeddings = [httpx2.post(f"{base}/v1/embeddings", json=EMBED, timeout=60).json() for base in (url, worker)]
    assert embeddings[0]["data"] == embeddings[1]["data"]
    assert httpx2.get(f"{url}/get_model_info", timeout=60).json()["model_path"] == "demo"
    with httpx2.stream("POST", f"{url}/generate", json=GENERATE | {"stream": True}, timeout=60) as stream:
        events = [line[6:] for line in stream.iter_lines() if line.startswith("data: {")]
    assert json.loads(events[-1])["text"] == text
    refused = httpx2.post(f"{url}/v1/chat/completions", json=CHAT | {"temperature": -1}, timeout=60)
    assert refused.status_code == 400, refused.text


def check_policy(url: str, workers: list[str]) -> None:
    """Check that 24 requests, eight at a time, are all answered; prints how many each worker answered."""
    before = [num_answered(worker) for worker in workers]
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: httpx2.post(f"{url}/v1/chat/completions", json=CHAT, timeout=60), range(24)))
    assert {answer.json()["choices"][0]["message"]["content"] for answer in answers} == {ANSWER}
    shares = [num_answered(worker) - start for worker, start in zip(workers, before, strict=True)]
    assert sum(shares) == 24, shares
    print(f"         {shares[0]} and {shares[1]} of 24 requests")


def check_kill(url: str, first: ServerProcess, second: ServerProcess) -> ServerProcess:
    """Kill the first worker under requests and start it again; returns the new one."""
    port = int(first.url.rpartition(":")[2])
    with ThreadPoolExecutor(4) as pool:
        pending = [pool.submit(httpx2.post, f"{url}/v1/chat/completions", json=CHAT, timeout=120) for _ in range(40)]
        pending[5].result()
        first.process.kill()
        answers = [each.result() for each in pending]
    assert [answer.status_code for answer in answers] == [200] * 40
    first.close()
    again = serve(port)
    try:
        start = num_answered(again.url)

        def is_used() -> bool:
            assert httpx2.post(f"{url}/v1/chat/completions", json=CHAT, timeout=60).status_code == 200
            return num_answered(again.url) > start

        wait_until(is_used, 60, "a request at the worker that came back")
    except BaseException:
        again.close()
        raise
    return again


def main() -> None:
    """Run all policies; exits with 1 if a check failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("router", choices=ROUTERS, help="package of the router")
    parser.add_argument("--python", required=True, help="Python of an environment with the router")
    options = parser.parse_args()
    version = f"import importlib.metadata as m; print(m.version('{options.router}'))"
    print(options.router, subprocess.check_output([options.python, "-c", version], text=True).strip(), flush=True)
    arguments, policies = ROUTERS[options.router]
    command = [options.python, "-m", *arguments]
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        workers = [serve(free_port()), serve(free_port())]
        stack.callback(lambda: [worker.close() for worker in workers])
        urls = [worker.url for worker in workers]
        for policy in policies:
            with router(command, urls, policy, Path(folder) / policy) as url:
                check_routes(url, urls[0])
                print(f"  ok     {policy}: chats, completions, /generate, embeddings, streams, errors", flush=True)
                check_policy(url, urls)
                if policy == "round_robin":
                    workers[0] = check_kill(url, *workers)
                    print("  ok     a worker killed under 40 requests, and back", flush=True)


if __name__ == "__main__":
    try:
        main()
    except (AssertionError, TimeoutError, httpx2.HTTPError, openai.OpenAIError) as error:
        traceback.print_exc()
        print(f"  FAILED {type(error).__name__}: {error}", flush=True)
        sys.exit(1)
