"""Runs programs with SGLang's genuine frontend language against `graftlm serve`, and with graftlm's language.

    python tests/clients/sglang_frontend.py --python build/clients/sglang/bin/python
    python tests/clients/sglang_frontend.py --python ... --sglang-programs

The programs are in `sglang_programs.py`. They run three times: with SGLang's frontend in its own environment, with
graftlm's language on the same server, and with graftlm's language on an engine in this process. A program fails if it
raises, if a state has an error, or if an expectation about the interface does not hold. The bundled model is small, so
no expectation concerns the content of a text, except that greedy texts are equal.

With `--sglang-programs`, the test programs in SGLang's wheel run with its frontend too. A failed expectation about a
text's content is reported, but is not a failure; every other error is one.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Final

from graftlm.testing.server_process import ServerProcess

HERE = Path(__file__).parent

#: Seconds for one run of all programs. A program of SGLang's frontend can wait forever after an error.
TIMEOUT_S: Final = 200.0


def run(python: str, arguments: list[str], *, is_ours: bool) -> dict[str, str]:
    """Run the programs in a process; returns the result of each: "ok", or what went wrong."""
    environment = dict(os.environ)
    if not is_ours:  # SGLang's environment does not contain graftlm
        environment.pop("PYTHONPATH", None)
    command = [python, str(HERE / "sglang_programs.py"), *arguments]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)
        lines, errors = done.stdout.splitlines(), done.stderr
    except subprocess.TimeoutExpired as expired:
        lines = (expired.stdout or b"").decode().splitlines()
        errors = f"not finished within {TIMEOUT_S:g} s"
    results = dict([json.loads(line) for line in lines if line.startswith('["')])
    if "end" not in results:
        results["end"] = f"the process ended early: {errors[-2000:]}"
    return results


def report(title: str, results: dict[str, str]) -> int:
    """Print the results; returns the number of failures."""
    print(title)
    for name, result in results.items():
        print(f"  {name:40} {result}")
    return sum(not result.startswith(("ok", "content: ")) for result in results.values())


def main() -> None:
    """Run all; exits with 1 if a program failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", required=True, help="Python of an environment with SGLang's frontend")
    parser.add_argument("--sglang-programs", action="store_true", help="also run the test programs in SGLang's wheel")
    options = parser.parse_args()
    with ServerProcess({"model": "demo"}) as server:
        failures = report(
            "SGLang's frontend, graftlm serve", run(options.python, ["sglang", server.url], is_ours=False)
        )
        failures += report("graftlm.lang, graftlm serve", run(sys.executable, ["graftlm", server.url], is_ours=True))
        failures += report("graftlm.lang, in process", run(sys.executable, ["graftlm", "process"], is_ours=True))
        if options.sglang_programs:
            arguments = ["sglang", server.url, "--wheel"]
            failures += report("the programs in SGLang's wheel", run(options.python, arguments, is_ours=False))
    print(f"{failures} failures")
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
