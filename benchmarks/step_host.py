"""Times a whole step of an engine around a model that computes nothing: everything that is not the model.

    python benchmarks/step_host.py [--steps N] [--json FILE]

A plugin brings a model of one layer whose hidden states and logits are constants, so that what is left is the host's
work: planning, the batch's tensors, preparing attention, the sampler's calls, committing, text, and the streams.
"Wall" is the time from step to step; "CPU" that of all threads. Then one thing grows at a time over three decades,
beside one running request: cached tokens, waiting requests, pages; a step's time should not.
"""

import argparse
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from graftlm import Engine, Provider, SamplingParams, hookimpl
from graftlm.contracts import (
    AttentionBackend,
    AttentionLayer,
    ForwardBatch,
    Model,
    ModelCapabilities,
    ModelContext,
)
from graftlm.records import StepRecord
from graftlm.testing.tiny_models import write_tiny_checkpoint

RESULTS = Path(__file__).parent / "results" / "step_host.json"
VOCAB_SIZE = 320
TOKEN_ID = 100
DECADES = (1_000, 10_000, 100_000)
WAITING = (100, 1_000, 10_000)


class NullModel(Model):
    """Says the same token for ever."""

    def __init__(self, context: ModelContext) -> None:
        self._hidden = torch.zeros(1, 8, dtype=context.dtype)
        self._logits = torch.zeros(1, VOCAB_SIZE, dtype=context.dtype)
        self._logits[0, TOKEN_ID] = 1.0
        self._outputs: dict[int, tuple[Tensor, Tensor]] = {}  # by their rows: even a view of a tensor takes a while

    @property
    def attention_layers(self) -> Sequence[AttentionLayer]:
        """One small layer."""
        return [AttentionLayer(layer_id=0, num_heads=1, num_kv_heads=1, head_dim=16, scale=1.0)]

    def bind_attention(self, backend: AttentionBackend) -> None:
        """Never attends."""

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Return zeros."""
        return self._of(batch.num_tokens)[0]

    def logits(self, hidden: Tensor) -> Tensor:
        """Return rows that favour one token."""
        return self._of(len(hidden))[1]

    def _of(self, num_rows: int) -> tuple[Tensor, Tensor]:
        if num_rows not in self._outputs:
            self._outputs[num_rows] = self._hidden.expand(num_rows, -1), self._logits.expand(num_rows, -1)
        return self._outputs[num_rows]

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """There are none."""


class NullPlugin:
    """Brings the model, and notes when steps end."""

    def __init__(self) -> None:
        self.ends: list[tuple[float, float, tuple[int, int]]] = []

    @hookimpl
    def provide_models(self) -> Iterable[Provider[Model]]:
        """Offer the model."""
        architectures = ModelCapabilities(architectures=("NullForCausalLM",))
        return [
            Provider(
                name="null",
                summary="computes nothing",
                api_version=1,
                create=lambda options, context: NullModel(context),
                capabilities=architectures,
            )
        ]

    @hookimpl
    def step_finished(self, record: StepRecord) -> None:
        """Note a step."""
        state = (record.num_decodes, record.num_waiting)
        self.ends.append((time.perf_counter(), time.process_time(), state))

    def microseconds(self, batch: int, waiting: int = 0) -> tuple[float, float]:
        """Return the time between steps of a full batch, the clock's median and all threads' mean; forgets them."""
        ends, self.ends = self.ends, []
        wanted = (batch, waiting)
        pairs = [(b[0] - a[0], b[1] - a[1]) for a, b in itertools.pairwise(ends) if a[2] == b[2] == wanted]
        return statistics.median(wall for wall, _ in pairs) * 1e6, statistics.mean(cpu for _, cpu in pairs) * 1e6


@dataclass(frozen=True, slots=True)
class Cell:
    """What one setting came to, in microseconds a step."""

    setting: str
    overlap: bool
    wall_us: float
    cpu_us: float


def engine(model: Path, plugin: NullPlugin, *, overlap: bool, kv_tokens: int, rows: int = 256) -> Engine:
    """Assemble an engine around the model."""
    config: dict[str, Any] = {
        "model": {"path": str(model), "architecture": "null"},
        "memory": {"kv_tokens": kv_tokens},
        "scheduling": {"overlap": overlap, "max_running_requests": rows, "max_queued_requests": 2 * max(DECADES)},
    }
    return Engine(config, plugins=[plugin])


def params(steps: int) -> SamplingParams:
    """Return greedy parameters for so many tokens."""
    return SamplingParams(temperature=0, max_tokens=steps, ignore_eos=True)


def by_batch(model: Path, steps: int) -> Iterator[Cell]:
    """Time steps of several batches, with overlap and without."""
    for overlap in (False, True):
        plugin = NullPlugin()
        with engine(model, plugin, overlap=overlap, kv_tokens=1 << 19) as it:
            for batch in (1, 16, 64, 256):
                it.generate([[1 + i % 300, 2, 3] for i in range(batch)], params(steps))
                wall_us, cpu_us = plugin.microseconds(batch)
                yield Cell(f"{batch} running", overlap, wall_us, cpu_us)


def growing(model: Path, steps: int) -> Iterator[Cell]:
    """Time steps of one request while something else grows."""
    for size in DECADES:
        plugin = NullPlugin()
        with engine(model, plugin, overlap=False, kv_tokens=size + 4 * steps) as it:
            it.generate([5, 6, 7], params(steps))
            wall_us, cpu_us = plugin.microseconds(1)
            yield Cell(f"{size:,} pages", False, wall_us, cpu_us)
    plugin = NullPlugin()
    with engine(model, plugin, overlap=False, kv_tokens=2 * max(DECADES)) as it:
        cached = 0
        for size in DECADES:
            while cached < size:
                num = min(200, size - cached)
                it.generate([[1 + (cached + 7 * i) % 319 for i in range(num)]], params(1))
                cached += num
            plugin.ends.clear()
            it.generate([5, 6, 7], params(steps))
            wall_us, cpu_us = plugin.microseconds(1)
            yield Cell(f"{size:,} cached tokens", False, wall_us, cpu_us)
    for size in WAITING:
        plugin = NullPlugin()
        with engine(model, plugin, overlap=False, kv_tokens=8192, rows=1) as it:
            prompts = [[5, 6, 7]] + [[8, 9, 10]] * size
            it.generate(prompts, [params(4000)] + [params(1)] * size)
            wall_us, cpu_us = plugin.microseconds(1, waiting=size)
            yield Cell(f"{size:,} waiting", False, wall_us, cpu_us)


def main() -> None:
    """Print a table and save it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--json", type=Path, default=RESULTS)
    args = parser.parse_args()
    table = Table("a step with", "overlap", "wall, µs", "CPU, µs")
    cells: list[Cell] = []
    with tempfile.TemporaryDirectory() as folder:
        model = write_tiny_checkpoint(Path(folder), tokenizer=True, max_position_embeddings=4096)
        for cell in [*by_batch(model, args.steps), *growing(model, args.steps)]:
            cells.append(cell)
            table.add_row(cell.setting, str(cell.overlap), f"{cell.wall_us:.0f}", f"{cell.cpu_us:.0f}")
    Console().print(table)
    args.json.write_text(json.dumps([asdict(cell) for cell in cells], indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
