"""Arize Phoenix receives the traces of a server over OTLP, and returns the spans of the requests.

python tests/clients/phoenix.py --python build/clients/phoenix/bin/python
"""

import argparse
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import httpx2

from graftlm.testing.server_process import ServerProcess, wait_until

CHAT: Final = {"model": "demo", "messages": [{"role": "user", "content": "What is 2 plus 3?"}], "temperature": 0}
#: A trace in which the client's own span is the parent of the request's.
TRACE: Final = "0af7651916cd43dd8448eb211c80319c"
PARENT: Final = "b7ad6b7169203331"


def free_ports(number: int) -> list[int]:
    """Return free TCP ports of the loopback interface."""
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(number)]
    ports = [listener.getsockname()[1] for listener in listeners]
    for listener in listeners:
        listener.close()
    return ports


@contextmanager
def phoenix(python: str, folder: Path) -> Iterator[str]:
    """Run Phoenix, and yield its URL when it is ready."""
    http, grpc = free_ports(2)
    settings = {"PHOENIX_HOST": "127.0.0.1", "PHOENIX_PORT": str(http), "PHOENIX_GRPC_PORT": str(grpc)}
    settings |= {"PHOENIX_WORKING_DIR": str(folder), "PHOENIX_TELEMETRY_ENABLED": "false"}
    log = folder / "log"
    with log.open("wb") as output:
        command = [str(Path(python).parent / "phoenix"), "serve"]
        process = subprocess.Popen(command, stdout=output, stderr=output, env=os.environ | settings)

    def is_ready() -> bool:
        assert process.poll() is None, log.read_text()[-2000:]
        try:
            return httpx2.get(f"http://127.0.0.1:{http}/healthz", timeout=10).status_code == 200
        except httpx2.HTTPError:
            return False

    try:
        wait_until(is_ready, 180, "Phoenix")
        yield f"http://127.0.0.1:{http}"
    finally:
        process.terminate()
        process.wait(60)


def spans(url: str) -> list[dict[str, Any]]:
    """Return the spans that Phoenix has stored."""
    answer = httpx2.get(f"{url}/v1/projects/default/spans", timeout=60)
    return list(answer.json()["data"]) if answer.status_code == 200 else []  # 404 before the first span


def check_spans(url: str) -> None:
    """Check a request's spans: its stages are their children, and it continues the client's trace."""
    wait_until(lambda: len(spans(url)) >= 4, 60, "the spans in Phoenix")
    stored = spans(url)
    assert {span["context"]["trace_id"] for span in stored} == {TRACE}
    by_name = {span["name"]: span for span in stored}
    assert by_name.keys() == {"POST /v1/chat/completions", "queue", "prefill", "decode"}
    request = by_name.pop("POST /v1/chat/completions")
    assert request["parent_id"] == PARENT
    assert {span["parent_id"] for span in by_name.values()} == {request["context"]["span_id"]}
    assert all(span["start_time"] <= span["end_time"] for span in stored)
    attributes = request["attributes"]
    assert attributes["gen_ai.operation.name"] == "chat"
    assert attributes["gen_ai.request.model"] == "demo"
    assert attributes["gen_ai.usage.output_tokens"] > 1


def main() -> None:
    """Run the checks; exits with 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", required=True, help="Python of an environment with arize-phoenix")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, phoenix(options.python, Path(folder)) as url:
        config = {"model": "demo", "server": {"traces": {"endpoint": url}}}
        with ServerProcess(config, timeout_s=600) as server:
            headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
            answer = httpx2.post(f"{server.url}/v1/chat/completions", json=CHAT, headers=headers, timeout=60)
            assert answer.status_code == 200, answer.text
            check_spans(url)
    print("  ok     arize-phoenix has the spans of a request, in the client's trace")


if __name__ == "__main__":
    sys.exit(main())
