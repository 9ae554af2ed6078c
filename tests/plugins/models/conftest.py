"""Helpers for the tests of all model families: comparisons of a model with transformers."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from graftlm.checkpoint import iter_weights, load_model_config
from graftlm.contracts import Model, ModelContext
from graftlm.testing.hugging_face import HuggingFaceModel
from graftlm.testing.paged_model import PagedModel, Tokens

AssertParity = Callable[[Callable[[ModelContext], Model], Path], None]


@pytest.fixture
def assert_parity() -> AssertParity:
    """Check that logits in ragged batches, chunks and pages equal those of transformers at every position of every
    prompt.
    """

    def check(create: Callable[[ModelContext], Model], checkpoint: Path) -> None:
        config = load_model_config(checkpoint)
        model = create(ModelContext(config, torch.device("cpu"), torch.float32))
        model.load_weights(iter_weights(checkpoint))
        draw = random.Random(7)
        prompts = [[draw.randrange(config.vocab_size) for _ in range(length)] for length in (1, 9, 23, 31)]
        oracle = HuggingFaceModel(checkpoint)
        for prompt, hidden in zip(prompts, _run_ragged(model, prompts, draw), strict=True):
            expected, got = oracle.logits(prompt), model.logits(hidden)
            assert got.shape == expected.shape
            assert float((got - expected).abs().max() / expected.abs().max()) < 1e-4
            assert got.argmax(dim=-1).tolist() == expected.argmax(dim=-1).tolist()

    return check


def _run_ragged(model: Model, prompts: list[list[int]], draw: random.Random) -> list[torch.Tensor]:
    """Run prompts together in chunks of random lengths; return the hidden states of each."""
    paged = PagedModel(model, page_size=3, max_context_len=48)
    pieces: list[list[torch.Tensor]] = [[] for _ in prompts]
    done = [0] * len(prompts)
    while unfinished := [row for row, prompt in enumerate(prompts) if done[row] < len(prompt)]:
        step = []
        for row in unfinished:
            chunk = prompts[row][done[row] : done[row] + draw.choice((1, 2, 8))]
            step.append(Tokens(row, chunk, done[row]))
            done[row] += len(chunk)
        for tokens, hidden in zip(step, paged.step(step), strict=True):
            pieces[tokens.row].append(hidden)
    return [torch.cat(parts) for parts in pieces]


@pytest.fixture
def new_context() -> Callable[[Path], ModelContext]:
    """Make the context with which a checkpoint's model is created."""

    def make(checkpoint: Path) -> ModelContext:
        return ModelContext(load_model_config(checkpoint), torch.device("cpu"), torch.float32)

    return make


@pytest.fixture
def rewrite_config() -> Callable[..., None]:
    """Remove entries from a checkpoint's config.json, and set others."""

    def rewrite(checkpoint: Path, remove: tuple[str, ...] = (), **entries: Any) -> None:
        file = checkpoint / "config.json"
        kept = {name: value for name, value in json.loads(file.read_text()).items() if name not in remove}
        file.write_text(json.dumps(kept | entries))

    return rewrite
