"""Runs random storms on the fake device, and checks every page after each step: millions of steps in minutes.

python tests/scheduling/random_steps.py [--steps 2000000] [--seed SEED] [--processes 2]

Each round draws a configuration (page size, chunk, overlap, reuse, policy; one memory, a second one for windows, or a
host tier) and runs one of the storms of `test_random_steps.py` and `test_lower_tiers.py`: a random sequence of
requests, aborts and failures. The default seed is the hour. A failed round prints its seed and its configuration.
"""

import argparse
import importlib.util
import json
import logging
import random
import subprocess
import sys
import threading
import time
import traceback
from collections import Counter
from pathlib import Path

HERE = Path(__file__).parent


def load(name):
    spec = importlib.util.spec_from_file_location(f"random_steps_{name}", HERE / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def kind_of(seed):
    return random.Random(f"kind of {seed}").choice(["pages", "pages", "windows", "tiers"])


class Rounds:
    """The kinds of storm, each with a random configuration.

    Args:
        steps: of one round, before its last requests end; a fifth of it in the storm over host memory.
        make_rig: makes the step loop over the fake device; None for the tests' own.
    """

    def __init__(self, steps=1000, make_rig=None):
        self.steps = steps
        self.rig = make_rig or load("conftest").Rig
        self.storms = load("test_random_steps")
        self.tiers = load("test_lower_tiers")

    def play(self, seed):
        """Run one round; return its name and a counter of its events.

        Raises:
            AssertionError: an invariant does not hold; the message has the round's configuration.
        """
        kind = kind_of(seed)
        settings = getattr(self, f"draw_{kind}")(random.Random(seed))
        try:
            return kind, getattr(self, f"play_{kind}")(seed, settings)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {kind} {settings}\n{traceback.format_exc()}") from error

    def draw_pages(self, draw):
        return {
            "page_size": draw.choice([1, 2, 4, 8, 16]),
            "chunk": draw.choice([1, 5, 7, 16, 33, 64]),
            "overlap": draw.random() < 0.7,
            "reuse": draw.random() < 0.8,
            "policy": draw.choice(sorted(self.storms.POLICIES)),
            "drafts": draw.random() < 0.5,
        }

    def draw_windows(self, draw):
        page_size = draw.choice([1, 2, 4, 8, 16])
        return {
            "page_size": page_size,
            "window_tokens": draw.randint(1, 24),
            "spare_tokens": draw.choice([0, 2, page_size]),
            # At least the tokens that one row of the largest window and one chunk need.
            "memory_tokens": draw.choice([8, 10, 16]) * max(16, page_size),
            "chunk": draw.choice([5, 7, 16, 64]),
            "overlap": draw.random() < 0.7,
            "reuse": draw.random() < 0.8,
            "drafts": draw.random() < 0.5,
        }

    def draw_tiers(self, draw):
        return {
            "page_size": draw.choice([1, 2, 4, 8]),
            "policy": draw.choice(["write_through", "write_through_selective", "write_back"]),
            "overlap": draw.random() < 0.5,
        }

    def play_pages(self, seed, settings):
        rig = self.storms.play(self.rig, self.steps, seed=seed, **settings)
        return self.counted(rig.scheduler, len(rig.requests))

    def play_windows(self, seed, settings):
        rig = self.storms.play_windows(self.rig, self.steps, seed=seed, **settings)
        return self.counted(rig.scheduler, len(rig.requests))

    def play_tiers(self, seed, settings):
        crowd = self.tiers.Crowd(seed, **settings)
        self.tiers.play(crowd, self.steps // 5)
        result = self.counted(crowd.scheduler, len(crowd.requests))
        crowd.loop.close()
        return result

    def counted(self, scheduler, num_requests):
        counters = scheduler.counters
        return Counter(
            steps=counters.steps,
            requests=num_requests,
            retractions=counters.retractions,
            cached_tokens=counters.cached_tokens,
            accepted_drafts=sum(counts.accepted for counts in counters.drafts.values()),
            rejected_drafts=sum(counts.drafted - counts.accepted for counts in counters.drafts.values()),
            evicted_pages=scheduler.kv.evicted_pages,
        )


def play_many(num_steps, seed, first_round, stride):
    """Run rounds until the number of steps is reached; yield each one's kind, counts and failure, if any."""
    logging.disable(logging.CRITICAL)  # failures of the device are part of a storm
    rounds, steps = Rounds(), 0
    number = first_round
    while steps < num_steps:
        failure = None
        try:
            kind, counts = rounds.play(seed * 1_000_003 + number)
        except AssertionError as error:
            kind, counts, failure = "failed", Counter(steps=rounds.steps), str(error)
        yield kind, counts, failure
        steps += counts["steps"]
        number += stride


class Totals:
    """The sums over all rounds: steps by kind of storm, events, and failures."""

    def __init__(self):
        self.kinds, self.counts, self.failures = Counter(), Counter(), []
        self._lock = threading.Lock()

    def add(self, kind, counts, failure):
        with self._lock:
            self.kinds[kind] += counts["steps"]
            self.counts.update(counts)
            if failure is not None:
                self.failures.append(failure)
                print(failure, flush=True)

    def read(self, worker):
        for line in worker.stdout:
            self.add(*json.loads(line))


def play(num_steps, seed, num_processes):
    """Run rounds in several processes; return the totals.

    Raises:
        RuntimeError: a process ended before its rounds were done.
    """
    totals, readers, workers = Totals(), [], []
    for i in range(num_processes):
        command = [sys.executable, __file__, "--steps", str(num_steps // num_processes), "--seed", str(seed)]
        command += ["--worker", str(i), "--processes", str(num_processes)]
        workers.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        readers.append(threading.Thread(target=totals.read, args=(workers[-1],)))
        readers[-1].start()
    for reader, worker in zip(readers, workers, strict=True):
        reader.join()
        if worker.wait() != 0:
            raise RuntimeError(f"a process ended with status {worker.returncode}")
    return totals


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=2_000_000)
    parser.add_argument("--seed", type=int, default=int(time.time()) // 3600, help="default: the hour")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker is not None:
        for result in play_many(options.steps, options.seed, options.worker, options.processes):
            print(json.dumps(result), flush=True)
        return 0
    start_s = time.monotonic()
    totals = play(options.steps, options.seed, options.processes)
    print(f"seed {options.seed}: {totals.counts['steps']:,} steps in {time.monotonic() - start_s:.0f} s")
    print("steps by storm: " + ", ".join(f"{kind} {steps:,}" for kind, steps in sorted(totals.kinds.items())))
    print(", ".join(f"{name} {count:,}" for name, count in sorted(totals.counts.items()) if name != "steps"))
    print(f"{len(totals.failures)} round(s) failed")
    return 1 if totals.failures else 0


if __name__ == "__main__":
    sys.exit(main())
