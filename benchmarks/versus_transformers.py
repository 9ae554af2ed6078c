"""graftlm beside Hugging Face Transformers' `generate`: the same random model, prompts and numbers of tokens, in turns.

    python benchmarks/versus_transformers.py --rounds 5 --json benchmarks/results/versus_transformers.json

Greedy, in float32, on a CPU, with as many threads on either side. Transformers gets the requests of a workload as one
padded batch, which is the fastest way it has without a server; it runs until the longest answer ends. The model is made
of random numbers, so what is compared is the engine around it, not answers; tokens of unpadded requests are compared.
"""

import argparse
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from graftlm import Engine, SamplingParams  # before torch, for its threads
from graftlm.testing.tiny_models import write_tiny_checkpoint

import torch  # isort: skip
from transformers import LlamaForCausalLM  # isort: skip

VOCAB_SIZE = 8000


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests that arrive at once.

    Attributes:
        prompts: token ids.
        output_lens: tokens to generate, one number for each prompt.
    """

    name: str
    prompts: tuple[tuple[int, ...], ...]
    output_lens: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens to generate, all together."""
        return sum(self.output_lens)


@dataclass(frozen=True, slots=True)
class Row:
    """Medians over rounds, output tokens per second.

    Attributes:
        ratio: of the two medians; `ratio_min` and `ratio_max` are those of the two runs of one round.
    """

    workload: str
    transformers_tokens_per_s: float
    graftlm_tokens_per_s: float
    ratio: float
    ratio_min: float
    ratio_max: float


def make_workloads(seed: int, scale: float) -> list[Workload]:
    """Draw the requests; `scale` is a factor on lengths."""
    draw = np.random.default_rng(seed)

    def tokens(length: int) -> tuple[int, ...]:
        return tuple(draw.integers(300, VOCAB_SIZE, size=max(2, int(length * scale))).tolist())

    def lens(low: int, high: int, count: int) -> tuple[int, ...]:
        return tuple(max(2, int(n * scale)) for n in draw.integers(low, high + 1, size=count))

    shared = tokens(256)
    return [
        Workload("one request", (tokens(128),), lens(32, 32, 1)),
        Workload("16 of one length", tuple(tokens(64) for _ in range(16)), lens(16, 16, 16)),
        Workload("16 of mixed lengths", tuple(tokens(n) for n in draw.integers(16, 193, size=16)), lens(2, 48, 16)),
        Workload("16 with a common prefix", tuple(shared + tokens(16) for _ in range(16)), lens(8, 8, 16)),
    ]


class TransformersSide:
    """One padded batch through `generate`."""

    def __init__(self, folder: Path) -> None:
        self._model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    @torch.inference_mode()
    def run(self, workload: Workload) -> list[list[int]]:
        """Return each request's tokens."""
        width = max(map(len, workload.prompts))
        ids = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in workload.prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in workload.prompts])
        longest = max(workload.output_lens)
        out = self._model.generate(
            ids, attention_mask=mask, do_sample=False, min_new_tokens=longest, max_new_tokens=longest, pad_token_id=0
        )
        return [row[width : width + n].tolist() for row, n in zip(out, workload.output_lens, strict=True)]


class GraftlmSide:
    """The same requests handed to an engine, its prefix cache empty."""

    def __init__(self, folder: Path) -> None:
        self.engine = Engine(model={"path": str(folder), "dtype": "float32"}, memory={"kv_tokens": 32768})

    def run(self, workload: Workload) -> list[list[int]]:
        """Return each request's tokens."""
        self.engine.flush_cache()
        params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in workload.output_lens]
        return [list(out.token_ids) for out in self.engine.generate([list(p) for p in workload.prompts], params)]


def compare(theirs: TransformersSide, ours: GraftlmSide, workloads: Sequence[Workload], rounds: int) -> list[Row]:
    """Run both sides in turns, the first one alternating, after a run of each to warm up."""
    rows = []
    for workload in workloads:
        same = [a == b for a, b in zip(theirs.run(workload), ours.run(workload), strict=True)]
        if len(set(map(len, workload.prompts))) == 1 and not all(same):
            raise SystemExit(f"{workload.name}: tokens of {same.count(False)} of {len(same)} requests differ")
        pairs = []
        for i in range(rounds):
            sides: list[Callable[[Workload], object]] = [theirs.run, ours.run]
            times = {side: timed(side, workload) for side in (sides if i % 2 else sides[::-1])}
            pairs.append((times[sides[0]], times[sides[1]]))
        ratios = [a / b for a, b in pairs]
        speeds = [workload.num_tokens / statistics.median(side) for side in zip(*pairs, strict=True)]
        rows.append(Row(workload.name, *speeds, speeds[1] / speeds[0], min(ratios), max(ratios)))
        print(
            f"{workload.name:26} {rows[-1].transformers_tokens_per_s:9.1f} {rows[-1].graftlm_tokens_per_s:9.1f} "
            f"{rows[-1].ratio:6.2f}x {min(ratios):.2f}-{max(ratios):.2f}",
            flush=True,
        )
    return rows


def timed(run: Callable[[Workload], object], workload: Workload) -> float:
    """Return the seconds that a run took."""
    start_s = time.perf_counter()
    run(workload)
    return time.perf_counter() - start_s


def main(arguments: Sequence[str] | None = None) -> None:
    """Run everything, print a table, save it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--scale", type=float, default=1.0, help="a factor on lengths")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as name:
        folder = write_tiny_checkpoint(
            Path(name),
            hidden_size=512,
            intermediate_size=1408,
            num_layers=options.layers,
            num_heads=8,
            num_kv_heads=4,
            head_dim=64,
            vocab_size=VOCAB_SIZE,
            max_position_embeddings=2048,
            initializer_range=0.05,
            tokenizer=True,
        )
        theirs, ours = TransformersSide(folder), GraftlmSide(folder)
        print(f"{'output tokens/s':26} {'Transf.':>9} {'graftlm':>9}   ratio  of rounds")
        with ours.engine:
            rows = compare(theirs, ours, make_workloads(0, options.scale), options.rounds)
    if options.json:
        machine = {"machine": platform.machine(), "threads": torch.get_num_threads(), "torch": torch.__version__}
        saved = {"machine": machine, "layers": options.layers, "rounds": options.rounds}
        options.json.write_text(json.dumps(saved | {"rows": [asdict(row) for row in rows]}, indent=1) + "\n")


if __name__ == "__main__":
    main()
