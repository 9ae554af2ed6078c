"""Sends valid and invalid requests, generated from the server's own OpenAPI document, and reports server errors.

python tests/server/fuzz.py [--cases 5000] [--seed 0]
"""

import argparse
import atexit
import copy
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress

import hypothesis
import requests
import schemathesis
from hypothesis import HealthCheck, Phase
from rich.console import Console
from rich.progress import Progress
from schemathesis import GenerationMode

from graftlm.testing.server_process import ServerProcess

#: Removed at the end of the process.
FILES = tempfile.mkdtemp(prefix="graftlm-fuzz-")
atexit.register(shutil.rmtree, FILES, ignore_errors=True)
#: A short context keeps what a request without a limit generates short.
CONFIG = {
    "model": {"path": "demo", "context_len": 96},
    "memory": {"kv_tokens": 8192},
    "server": {
        "request_timeout_s": 5.0,
        "clip_max_tokens": True,
        "log_level": "warning",
        "profile_dir": "build/fuzz-profiles",
        "open_admin": True,
        "trainer_timeout_s": 1.0,
        "checkpoint_roots": ["build"],
        "files": {"path": FILES},
    },
}
#: After these no request is answered; tests/server/test_native_control.py and test_native_memory.py test them.
LEFT_OUT = {"/pause_generation", "/release_memory_occupation", "/sleep"}
PROMPTS = {"prompt", "text", "input_ids", "input", "tokens"}
NEEDED = {"messages", "prompt", "text", "input_ids", "input", "tokens", "rid", "sampling_params", "max_tokens"}


def fuzz(url, num_cases, seed, advance=lambda: None):
    """Send at least `num_cases` requests; return the number of answers by operation and status, and the failures."""
    schema = schemathesis.openapi.from_url(url + "/openapi.json")
    operations = [result.ok() for result in schema.get_all_operations()]
    operations = [operation for operation in operations if operation.path not in LEFT_OUT]
    statuses, failures = Counter(), []
    session = requests.Session()
    while (missing := num_cases - statuses.total()) > 0:
        for operation in operations:
            takes_a_body = operation.method.lower() == "post" and "profile" not in operation.path
            num_examples = 2 + missing // 20 if takes_a_body else 1
            for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
                with suppress(hypothesis.errors.Unsatisfiable):  # without parameters, no parameter can be wrong
                    strategy = operation.as_strategy(generation_mode=mode)
                    send(strategy, mode, num_examples, seed, session, url, statuses, failures, advance, operation.label)
        seed += 1
    return statuses, failures


def plain(body, rng):
    """Keep only a few of a body's optional fields, and correct what a schema cannot express, so that more requests
    are valid.
    """
    if not isinstance(body, dict):
        return body
    kept = set(rng.sample(sorted(body), min(len(body), rng.randrange(4)))) - {"model"}
    body = {name: value for name, value in body.items() if name in kept | NEEDED}
    if rng.random() < 0.25:
        return body
    if "text" in body:
        body.pop("input_ids", None)
    for name in PROMPTS & body.keys():
        body[name] = mended(body[name]) or "x"
    body.pop("previous_response_id", None)
    for message in body.get("messages") or []:
        if not isinstance(message.get("content"), str):
            message["content"] = "x"
        message["role"] = rng.choice(["system", "user", "assistant"])
    return body


def mended(prompt):
    """Return a prompt without token ids outside the vocabulary and without text that is not Unicode."""
    if isinstance(prompt, list):
        return [mended(part) for part in prompt[:4]]
    if isinstance(prompt, str):
        return prompt.encode("utf-8", "replace").decode() or "x"
    return prompt % 500 if isinstance(prompt, int) else prompt if isinstance(prompt, float) else "x"


def send(strategy, mode, num_examples, seed, session, url, statuses, failures, advance, label):
    rng = random.Random(seed)

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=num_examples,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @hypothesis.given(case=strategy)
    def one(case):
        if mode is GenerationMode.POSITIVE:
            case.body = plain(copy.deepcopy(case.body), rng)
        try:
            answer = case.call(base_url=url, session=session, timeout=60)
        except (UnicodeError, requests.exceptions.InvalidHeader, requests.exceptions.InvalidURL):
            return  # this client cannot send it
        statuses[label, answer.status_code] += 1
        advance()
        if answer.status_code >= 500 and answer.status_code != 503:
            failures.append((label, answer.status_code, answer.text[:500], case.as_curl_command()))

    one()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    console = Console()
    start = time.monotonic()
    with ServerProcess(CONFIG, environment={"OMP_NUM_THREADS": "1"}) as server, Progress(console=console) as bar:
        task = bar.add_task("fuzzing", total=arguments.cases)
        statuses, failures = fuzz(server.url, arguments.cases, arguments.seed, lambda: bar.advance(task))
        healthy = requests.get(server.url + "/health", timeout=5).status_code
        log = server.log
    for (label, status), count in sorted(statuses.items()):
        console.print(f"{count:6} {status} {label}", highlight=False)
    total = sum(statuses.values())
    console.print(
        f"{total} requests in {time.monotonic() - start:.0f} s, {len(failures)} server errors, health {healthy}"
    )
    for failure in failures[:10]:
        console.print(*failure, sep="\n", highlight=False, markup=False)
    if failures:
        console.print(log[-3000:], highlight=False, markup=False)
    sys.exit(bool(failures) or healthy != 200)


if __name__ == "__main__":
    main()
