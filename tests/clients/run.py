"""Runs the programs of other projects' clients against `graftlm serve` with the bundled model.

    python tests/clients/run.py openai anthropic
    python tests/clients/run.py --environments build/clients openai

The program of a client is NAME_client.py. It runs with build/clients/NAME/bin/python, which `make test-clients`
creates, and prints one line for each check. The exit status is 1 if a check failed.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

from graftlm.testing.server_process import ServerProcess

HERE = Path(__file__).parent
KEY: Final = "key-of-the-test"
#: Seconds for all checks of one client.
TIMEOUT_S: Final = 300.0
#: Clients whose scripts start their own servers, with the arguments of each script.
OWN_SCRIPTS: Final = {
    "sglang": (["sglang_frontend.py", "--sglang-programs"], ["sglang_kits.py"]),
    "sglang_router": (["routers.py", "sglang-router"],),
    "smg": (["routers.py", "smg"],),
    "phoenix": (["phoenix.py"],),
}


def serve(folder: str) -> ServerProcess:
    """Start a server with a key, a folder for files and the bundled model."""
    return ServerProcess({"model": "demo", "server": {"api_key": KEY, "files": {"path": folder}}}, timeout_s=600)


def run(name: str, python: str, url: str) -> dict[str, str]:
    """Run the program of a client; returns its versions and the result of each check: "ok", or what went wrong."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    command = [python, str(HERE / f"{name}_client.py"), url, KEY]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)
        lines, errors = done.stdout.splitlines(), done.stderr
    except subprocess.TimeoutExpired as expired:
        lines = (expired.stdout or b"").decode().splitlines()
        errors = f"not finished within {TIMEOUT_S:g} s"
    results = dict(json.loads(line) for line in lines if line.startswith('["'))
    if "end" not in results:
        results["end"] = f"the process ended early: {errors[-2000:]}"
    return results


def failures(results: dict[str, str]) -> dict[str, str]:
    """Return the checks that failed."""
    return {name: result for name, result in results.items() if name != "versions" and result != "ok"}


def report(name: str, results: dict[str, str]) -> int:
    """Print the results of a client; returns the number of failures."""
    print(f"{name} ({results.get('versions', 'no version')})")
    for check, result in results.items():
        if check not in ("versions", "end"):
            print(f"  {'ok    ' if result == 'ok' else 'FAILED'} {check}")
    for check, result in failures(results).items():
        print(f"\n{name}: {check}\n{result}")
    sys.stdout.flush()
    return len(failures(results))


def main() -> None:
    """Run the clients; exits with 1 if a check failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+", help="clients, such as openai")
    parser.add_argument("--environments", default="build/clients", help="folder with an environment for each client")
    options = parser.parse_args()
    pythons = {name: f"{options.environments}/{name}/bin/python" for name in options.names}
    num_failures = 0
    for name in [name for name in OWN_SCRIPTS if name in pythons]:
        python = pythons.pop(name)
        for script, *arguments in OWN_SCRIPTS[name]:
            command = [sys.executable, str(HERE / script), *arguments, "--python", python]
            num_failures += subprocess.run(command).returncode != 0
    if pythons.pop("prometheus", None):
        programs = ["--programs", f"{options.environments}/prometheus/usr/bin"]
        num_failures += subprocess.run([sys.executable, str(HERE / "prometheus.py"), *programs]).returncode != 0
    if pythons:
        with tempfile.TemporaryDirectory() as folder, serve(folder) as server:
            num_failures += sum(report(name, run(name, python, server.url)) for name, python in pythons.items())
    print(f"{len(options.names)} clients, {num_failures} failures")
    sys.exit(bool(num_failures))


if __name__ == "__main__":
    main()
