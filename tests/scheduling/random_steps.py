"""Plays random storms over the fake device, with every page checked after each step: millions of steps in minutes.

python tests/scheduling/random_steps.py [--steps 2000000] [--seed SEED] [--processes 2]

Each round draws a configuration (page size, chunk, overlap, reuse, policy; one memory, a second one for windows, or a
host tier) and plays one of the storms of `test_random_steps.py` and `test_lower_tiers.py`. The default seed is the
hour. A failed round prints its seed and its configuration.
"""

import argparse
import importlib.util
import logging
import multiprocessing
import random
import sys
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
    """The storms by kind, each with a random configuration.

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
        """Play one round; returns its name and a counter of what happened.

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
        }

    def draw_windows(self, draw):
        page_size = draw.choice([1, 2, 4, 8, 16])
        return {
            "page_size": page_size,
            "window_tokens": draw.randint(1, 24),
            "spare_tokens": draw.choice([0, 2, page_size]),
            # At least what one row of the largest window and one chunk need.
            "memory_tokens": draw.choice([8, 10, 16]) * max(16, page_size),
            "chunk": draw.choice([5, 7, 16, 64]),
            "overlap": draw.random() < 0.7,
            "reuse": draw.random() < 0.8,
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
            evicted_pages=scheduler.kv.evicted_pages,
        )


def play_many(num_steps, seed, first_round, stride, report):
    """Play rounds until there have been enough steps; every round's result goes to `report`."""
    logging.disable(logging.CRITICAL)  # a device that fails is part of a storm
    rounds, steps = Rounds(), 0
    number = first_round
    while steps < num_steps:
        try:
            kind, counts = rounds.play(seed * 1_000_003 + number)
        except AssertionError as error:
            kind, counts = "failed", Counter(steps=rounds.steps)
            report.put((kind, counts, str(error)))
        else:
            report.put((kind, counts, None))
        steps += counts["steps"]
        number += stride
    report.put(None)


def play(num_steps, seed, num_processes, when_failed=print):
    """Play rounds in several processes; returns counters of steps by kind and of what happened, and the failures."""
    context = multiprocessing.get_context("spawn")
    report = context.Queue()
    workers = [
        context.Process(
            target=play_many, args=(num_steps // num_processes, seed, i, num_processes, report), daemon=True
        )
        for i in range(num_processes)
    ]
    for worker in workers:
        worker.start()
    kinds, totals, failures = Counter(), Counter(), []
    running = num_processes
    while running:
        message = report.get(timeout=300)
        if message is None:
            running -= 1
            continue
        kind, counts, failure = message
        kinds[kind] += counts["steps"]
        totals.update(counts)
        if failure is not None:
            failures.append(failure)
            when_failed(failure)
    for worker in workers:
        worker.join()
    return kinds, totals, failures


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=2_000_000)
    parser.add_argument("--seed", type=int, default=int(time.time()) // 3600, help="default: the hour")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    start_s = time.monotonic()
    kinds, totals, failures = play(options.steps, options.seed, options.processes)
    print(f"seed {options.seed}: {totals['steps']:,} steps in {time.monotonic() - start_s:.0f} s")
    print("steps by storm: " + ", ".join(f"{kind} {steps:,}" for kind, steps in sorted(kinds.items())))
    print(", ".join(f"{name} {count:,}" for name, count in sorted(totals.items()) if name != "steps"))
    print(f"{len(failures)} round(s) failed")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
