"""Times the steps of an engine whose model computes nothing, that is, all work of a step except the model's.

    python benchmarks/step_host.py [--steps N] [--rounds N] [--json FILE]

A plugin provides a model of one layer whose hidden states and logits are constants. The remaining work is the host's:
planning, the batch's tensors, preparation of attention, the sampler's calls, committing, detokenization, and output
streams. "Wall" is the time from step to step; "CPU" is the CPU time of all threads.

The first settings differ in the number of running requests. The others have one running request, and a growing number
of cached tokens, of waiting requests, or of pages, in three sizes a factor of 10 apart; a step's time should not grow.
The settings of a group alternate, in several rounds. The table, as JSON, and a plot are saved.
"""

import argparse
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
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
BATCHES = (1, 16, 64, 256)


class NullModel(Model):
    """A model that always returns the same token."""

    def __init__(self, context: ModelContext) -> None:
        self._hidden = torch.zeros(1, 8, dtype=context.dtype)
        self._logits = torch.zeros(1, VOCAB_SIZE, dtype=context.dtype)
        self._logits[0, TOKEN_ID] = 1.0
        self._outputs: dict[int, tuple[Tensor, Tensor]] = {}  # number of rows -> outputs, as creating a view takes time

    @property
    def attention_layers(self) -> Sequence[AttentionLayer]:
        """The attention layers of the model: one small layer."""
        return [AttentionLayer(layer_id=0, num_heads=1, num_kv_heads=1, head_dim=16, scale=1.0)]

    def bind_attention(self, backend: AttentionBackend) -> None:
        """Do nothing; the model has no attention."""

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Return zeros."""
        return self._of(batch.num_tokens)[0]

    def logits(self, hidden: Tensor) -> Tensor:
        """Return rows in which one token has the highest logit."""
        return self._of(len(hidden))[1]

    def _of(self, num_rows: int) -> tuple[Tensor, Tensor]:
        if num_rows not in self._outputs:
            self._outputs[num_rows] = self._hidden.expand(num_rows, -1), self._logits.expand(num_rows, -1)
        return self._outputs[num_rows]

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Do nothing; the model has no weights."""


class NullPlugin:
    """A plugin that provides the model, and records the time at which each step ends."""

    def __init__(self) -> None:
        self.ends: list[tuple[float, float, tuple[int, int]]] = []

    @hookimpl
    def provide_models(self) -> Iterable[Provider[Model]]:
        """Return the provider of the model."""
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
        """Record a step."""
        state = (record.num_decodes, record.num_waiting)
        self.ends.append((time.perf_counter(), time.process_time(), state))

    def microseconds(self, batch: int, waiting: int = 0) -> tuple[float, float]:
        """Return (median wall time, mean CPU time) per step of a full batch in microseconds, and clear the records."""
        ends, self.ends = self.ends, []
        wanted = (batch, waiting)
        pairs = [(b[0] - a[0], b[1] - a[1]) for a, b in itertools.pairwise(ends) if a[2] == b[2] == wanted]
        return statistics.median(wall for wall, _ in pairs) * 1e6, statistics.mean(cpu for _, cpu in pairs) * 1e6


@dataclass(frozen=True, slots=True)
class Setting:
    """The load of an engine while its steps are timed.

    Attributes:
        group: name of a group of settings, which alternate and differ in one size only.
        size: value of the size in which the settings of the group differ.
        running, waiting: numbers of requests.
        pages: number of pages of the KV memory, one token each; 0: the number that the requests need.
        cached_tokens: number of cached tokens of other prompts.
    """

    group: str
    size: int
    overlap: bool = False
    running: int = 1
    waiting: int = 0
    pages: int = 0
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Cell:
    """The times of one setting in microseconds per step, medians over the rounds."""

    group: str
    size: int
    overlap: bool
    wall_us: float
    cpu_us: float


def engine(model: Path, plugin: NullPlugin, *, overlap: bool, kv_tokens: int, rows: int = 256) -> Engine:
    """Return an engine with the model that computes nothing."""
    config: dict[str, Any] = {
        "model": {"path": str(model), "architecture": "null"},
        "memory": {"kv_tokens": kv_tokens},
        "scheduling": {"overlap": overlap, "max_running_requests": rows, "max_queued_requests": 2 * max(DECADES)},
    }
    return Engine(config, plugins=[plugin])


def params(steps: int) -> SamplingParams:
    """Return greedy sampling parameters with which a request generates exactly `steps` tokens."""
    return SamplingParams(temperature=0, max_tokens=steps, ignore_eos=True)


def settings(steps: int) -> list[Setting]:
    """Return the settings to time."""
    batches = [
        Setting("running requests", batch, overlap, running=batch) for overlap in (False, True) for batch in BATCHES
    ]
    pages = [Setting("pages", size, pages=size + 4 * steps) for size in DECADES]
    cached = [Setting("cached tokens", size, pages=2 * max(DECADES), cached_tokens=size) for size in DECADES]
    waiting = [Setting("waiting requests", size, waiting=size) for size in WAITING]
    return [*batches, *pages, *cached, *waiting]


class Timed:
    """An engine in one setting.

    Args:
        model: the checkpoint.
        steps: number of steps to time in each round.
    """

    def __init__(self, setting: Setting, model: Path, steps: int) -> None:
        self.setting = setting
        self._steps = steps
        self._plugin = NullPlugin()
        tokens = setting.pages or setting.running * (steps + 16)
        rows = 1 if setting.waiting else 256
        self._engine = engine(model, self._plugin, overlap=setting.overlap, kv_tokens=tokens, rows=rows)
        for first in range(0, setting.cached_tokens, 200):
            num = min(200, setting.cached_tokens - first)
            self._engine.generate([[1 + (first + 7 * i) % 319 for i in range(num)]], params(1))

    def round(self) -> tuple[float, float]:
        """Return the wall and the CPU time of a step, in microseconds."""
        setting = self.setting
        self._plugin.ends.clear()
        prompts = [[1 + i % 300, 2, 3] for i in range(setting.running)] + [[8, 9, 10]] * setting.waiting
        lengths = [params(self._steps)] * setting.running + [params(1)] * setting.waiting
        self._engine.generate(prompts, lengths)
        return self._plugin.microseconds(setting.running, setting.waiting)

    def close(self) -> None:
        """Close the engine."""
        self._engine.close()


def timed(found: Sequence[Setting], model: Path, steps: int, rounds: int) -> Iterator[Cell]:
    """Measure the settings alternately, so that a slow moment of the machine affects all of them."""
    with ExitStack() as stack:
        rigs = [stack.enter_context(closing(Timed(setting, model, steps))) for setting in found]
        taken = [[rig.round() for rig in rigs] for _ in range(rounds)]
    for setting, times in zip(found, zip(*taken, strict=True), strict=True):
        wall, cpu = (statistics.median(column) for column in zip(*times, strict=True))
        yield Cell(setting.group, setting.size, setting.overlap, wall, cpu)


def plot(cells: Sequence[Cell], path: Path) -> None:
    """Draw the time of a step against the size that grows."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 5))
    for group in dict.fromkeys(cell.group for cell in cells):
        row = [cell for cell in cells if cell.group == group and not cell.overlap]
        axes.plot([cell.size for cell in row], [cell.wall_us for cell in row], marker="o", label=group)
    axes.set(xscale="log", ylim=(0, None), xlabel="how many", ylabel="µs a step, without the model")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    """Print a table; save it and a plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--json", type=Path, default=RESULTS)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    table = Table("a step with", "overlap", "wall, µs", "CPU, µs")
    cells: list[Cell] = []
    with tempfile.TemporaryDirectory() as folder:
        model = write_tiny_checkpoint(Path(folder), tokenizer=True, max_position_embeddings=4096)
        for _, group in itertools.groupby(settings(args.steps), lambda setting: setting.group):
            cells += timed(list(group), model, args.steps, args.rounds)
    for cell in cells:
        what = f"{cell.size:,} {cell.group}"
        table.add_row(what, str(cell.overlap), f"{cell.wall_us:.0f}", f"{cell.cpu_us:.0f}")
    Console().print(table)
    args.json.write_text(json.dumps([asdict(cell) for cell in cells], indent=1) + "\n", encoding="utf-8")
    plot(cells, args.json.with_suffix(".svg"))


if __name__ == "__main__":
    main()
