"""Writes traces for the comparison in docs/eviction.md: generated ones, and the two halves of a recorded one.

python benchmarks/eviction_traces.py traces --recorded trace.jsonl
graftlm cache-sim traces/*.jsonl --eviction all --capacity 2%,5%,10%,20%
"""

import argparse
import heapq
import itertools
import json
import random
from collections.abc import Iterator
from pathlib import Path

BLOCK_TOKENS = 512
NUM_REQUESTS = 3000

#: Arrival time of a request in seconds, and the ids of its prompt's blocks.
Arrival = tuple[float, list[int]]


class Blocks:
    """A generator of ids for new blocks."""

    def __init__(self) -> None:
        self._ids = itertools.count(1)

    def __call__(self, num_blocks: int) -> list[int]:
        """Return `num_blocks` new ids."""
        return list(itertools.islice(self._ids, num_blocks))


def few_shot(rng: random.Random) -> Iterator[Arrival]:
    """Yield two few-shot questions per second for 60 tasks, whose popularity follows Zipf's law."""
    blocks = Blocks()
    examples = [blocks(rng.randint(4, 20)) for _ in range(60)]
    popularity = [1 / rank for rank in range(1, 61)]
    now = 0.0
    for _ in range(NUM_REQUESTS):
        now += rng.expovariate(2)
        yield now, rng.choices(examples, popularity)[0] + blocks(rng.randint(1, 2))


def agents(rng: random.Random) -> Iterator[Arrival]:
    """Yield the calls of 200 agents; each call continues the previous one, after a tool has run for 8 s on average."""
    blocks = Blocks()
    instructions = blocks(8)
    waiting = [(rng.uniform(0, 200), agent, instructions + blocks(2)) for agent in range(200)]
    heapq.heapify(waiting)
    for _ in range(NUM_REQUESTS):
        now, agent, prompt = heapq.heappop(waiting)
        prompt = prompt + blocks(rng.randint(1, 6))
        yield now, prompt
        if rng.random() < 0.93:
            heapq.heappush(waiting, (now + rng.expovariate(1 / 8), agent, prompt))
        else:  # the task is done, and the next one starts
            heapq.heappush(waiting, (now + rng.expovariate(1 / 60), agent, instructions + blocks(2)))


def scans(rng: random.Random) -> Iterator[Arrival]:
    """Yield few-shot questions, and between them long documents that are read once."""
    blocks = Blocks()
    blocks(10**6)  # skip the ids of the questions
    for now, prompt in few_shot(rng):
        yield now, prompt
        if rng.random() < 0.3:
            yield now, blocks(rng.randint(20, 60))


def write(path: Path, arrivals: Iterator[Arrival]) -> None:
    """Write a trace in the format of Mooncake."""
    with path.open("w") as file:
        for now, blocks in arrivals:
            line = {"timestamp": int(now * 1000), "input_length": len(blocks) * BLOCK_TOKENS, "output_length": 1}
            file.write(json.dumps(line | {"hash_ids": blocks}) + "\n")


def main() -> None:
    """Write all traces into a folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--recorded", type=Path, help="a trace to cut in halves")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    for make in (few_shot, agents, scans):
        write(options.folder / f"{make.__name__}.jsonl", make(random.Random(0)))
    if options.recorded is not None:
        lines = options.recorded.read_text().splitlines(keepends=True)
        middle = len(lines) // 2
        for name, half in (("first_half", lines[:middle]), ("second_half", lines[middle:])):
            (options.folder / f"{name}.jsonl").write_text("".join(half))


if __name__ == "__main__":
    main()
