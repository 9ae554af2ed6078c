"""Prometheus reads /metrics: `promtool` checks it after some requests, and `prometheus` scrapes it.

python tests/clients/prometheus.py --programs build/clients/prometheus/usr/bin
"""

import argparse
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

import httpx2
import yaml

from graftlm.testing.server_process import ServerProcess, wait_until

KEY: Final = "key-of-the-test"
HEADERS: Final = {"Authorization": f"Bearer {KEY}"}
CHAT: Final = {"model": "demo", "messages": [{"role": "user", "content": "What is 2 plus 3?"}], "temperature": 0}
NUM_CHATS: Final = 3
#: The number of finished requests, as Prometheus computes it.
QUERY: Final = "sum(graftlm_requests_finished_total)"


def check_metrics(programs: Path, server: ServerProcess) -> None:
    """Check that `promtool check metrics` accepts the metrics without a remark."""
    text = httpx2.get(f"{server.url}/metrics", headers=HEADERS, timeout=60).text
    done = subprocess.run([programs / "promtool", "check", "metrics"], input=text, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", ""), done


def check_scrape(programs: Path, server: ServerProcess, folder: Path) -> None:
    """Check that Prometheus scrapes the server with its key, and counts the requests."""
    target = {"job_name": "graftlm", "authorization": {"credentials": KEY}}
    target["static_configs"] = [{"targets": [server.url.removeprefix("http://")]}]
    config = folder / "prometheus.yml"
    config.write_text(yaml.safe_dump({"global": {"scrape_interval": "1s"}, "scrape_configs": [target]}))
    subprocess.run([programs / "promtool", "check", "config", config], check=True, capture_output=True)
    log = folder / "log"
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    command = [str(programs / "prometheus"), f"--config.file={config}", f"--web.listen-address={address}"]
    with log.open("wb") as output:
        process = subprocess.Popen([*command, f"--storage.tsdb.path={folder / 'data'}"], stdout=output, stderr=output)

    def is_counted() -> bool:
        assert process.poll() is None, log.read_text()[-2000:]
        try:
            answer = httpx2.get(f"http://{address}/api/v1/query", params={"query": QUERY}, timeout=10)
        except httpx2.HTTPError:
            return False
        result = answer.json()["data"]["result"] if answer.status_code == 200 else []
        return bool(result) and float(result[0]["value"][1]) == NUM_CHATS

    try:
        wait_until(is_counted, 60, "the requests in Prometheus")
        targets = httpx2.get(f"http://{address}/api/v1/targets", timeout=10).json()["data"]["activeTargets"]
        assert [(each["health"], each["lastError"]) for each in targets] == [("up", "")]
    finally:
        process.terminate()
        process.wait(30)


def main() -> None:
    """Run both checks; exits with 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", required=True, type=Path, help="folder of prometheus and promtool")
    programs = parser.parse_args().programs
    version = subprocess.run([programs / "prometheus", "--version"], capture_output=True, text=True)
    print(" ".join((version.stdout + version.stderr).split()[:3]).rstrip(","), flush=True)
    with (
        tempfile.TemporaryDirectory() as folder,
        ServerProcess({"model": "demo", "server": {"api_key": KEY}}, timeout_s=600) as server,
    ):
        for _ in range(NUM_CHATS):
            url = f"{server.url}/v1/chat/completions"
            assert httpx2.post(url, json=CHAT, headers=HEADERS, timeout=60).status_code == 200
        check_metrics(programs, server)
        print("  ok     promtool check metrics", flush=True)
        check_scrape(programs, server, Path(folder))
        print("  ok     scrapes with the server's key", flush=True)


if __name__ == "__main__":
    try:
        main()
    except (AssertionError, TimeoutError, subprocess.SubprocessError, httpx2.HTTPError) as error:
        print(f"  FAILED {type(error).__name__}: {error}", flush=True)
        sys.exit(1)
