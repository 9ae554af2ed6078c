"""Greedy tokens equal those of Transformers when sliding-window layers keep only slightly more than their windows."""

import itertools

import numpy as np
import pytest

from graftlm.assembly.assemble import assemble
from graftlm.config import EngineConfig
from graftlm.contracts import Platform
from graftlm.errors import ConfigError
from graftlm.registry import Registry
from graftlm.testing.hugging_face import HuggingFaceModel
from graftlm.testing.tiny_models import write_tiny_checkpoint
from graftlm.types import SamplingParams

WINDOW = 16
MAX_TOKENS = 24
LONGEST_PROMPT = 8 * WINDOW

#: In the first model, all layers have windows; in the second model, every second layer has one.
MODELS = {
    "mistral": ("mistral", {"num_layers": 2, "config": {"sliding_window": WINDOW}}),
    "gemma2": ("gemma2", {"num_layers": 3, "config": {"sliding_window": WINDOW}}),
}

#: (cache, page size, prefill tokens per step, overlap, logical tokens, window tokens)
CASES = [
    ("swa_radix", 1, 7, True, 1000, 400),
    ("swa_radix", 1, 64, False, 1000, 80),
    ("swa_radix", 4, 64, True, 200, 400),
    ("swa_radix", 4, 512, True, 400, 120),
    ("swa_radix", 16, 24, True, 640, 320),
    ("swa_chunk", 1, 7, False, 1000, 80),
    ("swa_chunk", 4, 64, True, 320, 120),
    ("swa_chunk", 16, 512, True, 640, 160),
]


def make_prompts():
    """Return prompts of up to 8 windows; two thirds start with one of two common prefixes."""
    rng = np.random.default_rng(5)
    prefixes = [rng.integers(1, 320, n).tolist() for n in (3 * WINDOW + 5, 5 * WINDOW)]
    prompts = [rng.integers(1, 320, LONGEST_PROMPT).tolist(), [7]]
    for i in range(16):
        own = rng.integers(1, 320, int(rng.integers(1, 3 * WINDOW))).tolist()
        prompts.append((prefixes[i % 3] if i % 3 < 2 else []) + own)
    return prompts


@pytest.fixture(scope="module")
def workload(tmp_path_factory):
    """Return a function from a model's name to its checkpoint, prompts and transformers' answers."""
    made = {}

    def get(name):
        if name not in made:
            family, sizes = MODELS[name]
            path = write_tiny_checkpoint(tmp_path_factory.mktemp(name), family, tokenizer=True, **sizes)
            oracle = HuggingFaceModel(path)
            prompts = make_prompts()
            made[name] = path, prompts, [oracle.generate(prompt, MAX_TOKENS) for prompt in prompts]
        return made[name]

    return get


def make_parts(path, **config):
    settings = EngineConfig.load(
        {"model": {"path": str(path), "dtype": "float32", "device": "cpu"}, "debug": True}, **config
    )
    return assemble(settings, Registry.load(settings.plugins), Platform("cpu"))


class Run:
    """An engine's parts, run step by step; after each step, no row may have more than its maximum of window pages."""

    def __init__(self, path, **config):
        self.parts = make_parts(path, **config)
        self.kv = self.parts.loop.scheduler.kv
        self.chunk_pages = self.kv.pages_for(config["scheduling"]["prefill_tokens_per_step"]) + 1
        self.tokens = {}
        self.cached = {}

    def add(self, request_id, prompt):
        params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
        intake = self.parts.intake
        self.parts.loop.scheduler.add(intake.request(request_id, intake.check_prompt(prompt), params))
        self.tokens[request_id] = []

    def step(self):
        for update in self.parts.loop.step():
            self.tokens[update.request_id] += update.token_ids
            if update.usage is not None:
                self.cached[update.request_id] = update.usage.cached_tokens
        held = self.kv.window.num_held - self.kv.cache.evictable_window_pages
        num_running = self.parts.loop.scheduler.num_running
        assert held <= num_running * self.kv.window.span.row_pages + self.chunk_pages

    def drain(self):
        for _ in range(5000):
            if not self.parts.loop.scheduler.has_work:
                return
            self.step()
        raise AssertionError("the engine does not come to an end")


@pytest.mark.covering
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("cache", "page_size", "chunk", "overlap", "kv_tokens", "window_tokens"), CASES)
def test_greedy_tokens_equal_transformers(workload, model, cache, page_size, chunk, overlap, kv_tokens, window_tokens):
    path, prompts, answers = workload(model)
    run = Run(
        path,
        cache={"name": cache, "page_size": page_size},
        scheduling={"prefill_tokens_per_step": chunk, "overlap": overlap, "max_running_requests": 6},
        memory={"kv_tokens": kv_tokens, "window_tokens": window_tokens},
    )
    assert run.kv.window.num_window_pages == min(kv_tokens, window_tokens) // page_size
    for first, last in itertools.pairwise([0, 6, 12, len(prompts)]):
        for i in range(first, last):
            run.add(str(i), prompts[i])
        for _ in range(8):
            run.step()
    run.drain()
    run.parts.loop.close()
    for i, expected in enumerate(answers):
        assert run.tokens[str(i)] == expected, f"request {i}, prompt of {len(prompts[i])} tokens"
    stats = run.parts.loop.stats()
    assert (stats.cached_tokens > 0) == (cache == "swa_radix")
    assert stats.owned_pages == stats.locked_pages == 0


def test_with_little_memory_both_kinds_of_eviction_and_retraction_occur(workload):
    path, prompts, answers = workload("gemma2")
    run = Run(
        path,
        cache={"name": "swa_radix"},
        scheduling={"prefill_tokens_per_step": 64, "max_running_requests": 16},
        memory={"kv_tokens": 400, "window_tokens": 100},
    )
    lost_windows = []
    for round_ in range(2):
        for i, prompt in enumerate(prompts):
            run.add(f"{round_}-{i}", prompt)
        while run.parts.loop.scheduler.has_work:
            run.step()
            lost_windows.append(any(not view.has_window for view in run.kv.cache.walk()))
    run.parts.loop.close()
    for i, expected in enumerate(answers):
        assert run.tokens[f"0-{i}"] == run.tokens[f"1-{i}"] == expected
    assert any(lost_windows)
    assert run.parts.loop.stats().retractions > 0
    assert run.kv.evicted_pages > 0


@pytest.mark.parametrize(
    ("cache", "page_size", "kv_tokens"), [("swa_radix", 16, 32), ("swa_radix", 1, 30), ("swa_chunk", 4, 40)]
)
def test_requests_run_in_the_smallest_memory(workload, cache, page_size, kv_tokens):
    path, prompts, _ = workload("mistral")
    run = Run(
        path,
        cache={"name": cache, "page_size": page_size},
        scheduling={"prefill_tokens_per_step": 64, "max_running_requests": 4},
        memory={"kv_tokens": kv_tokens},
    )
    for i in range(4):
        run.add(f"{i}", prompts[0][i : i + kv_tokens - MAX_TOKENS])
    run.drain()
    run.parts.loop.close()
    assert all(len(tokens) == MAX_TOKENS for tokens in run.tokens.values())


def test_a_second_turn_continues_from_the_first(workload):
    path, prompts, answers = workload("gemma2")
    run = Run(
        path,
        cache={"name": "swa_radix", "page_size": 4},
        scheduling={"prefill_tokens_per_step": 64, "max_running_requests": 4},
        memory={"kv_tokens": 2000, "window_tokens": 400},
    )
    run.add("first", prompts[0])
    run.drain()
    so_far = prompts[0] + answers[0]
    for i, dropped in enumerate((0, 1, 3)):  # the last tokens of an answer are often not part of the next prompt
        run.add(f"turn-{i}", [*so_far[: len(so_far) - dropped], 5, 6, 7])
        run.drain()
        cached = run.cached[f"turn-{i}"]
        assert len(so_far) - dropped - 2 * 4 < cached <= len(so_far) - dropped
    run.parts.loop.close()


def test_window_memory_is_smaller_than_one_common_memory(workload):
    path, *_ = workload("mistral")
    sizes = {}
    for cache in ("radix", "swa_radix"):
        parts = make_parts(
            path,
            cache={"name": cache},
            scheduling={"max_running_requests": 4, "prefill_tokens_per_step": 64},
            memory={"kv_tokens": 4000},
        )
        window = parts.loop.scheduler.kv.window
        sizes[cache] = parts.loop.scheduler.kv.pool.num_pages if window is None else window.num_window_pages
        parts.loop.close()
    # Each of 4 rows: 15 pages in the window and 4 spare ones, 3 passed, 2 more; a chunk of 64; a quarter of 4,000.
    assert sizes == {"radix": 4000, "swa_radix": 4 * (15 + 4 + 3 + 2) + 64 + 1000}


@pytest.mark.parametrize(
    ("cache", "window_tokens", "message"),
    [
        ("radix", 100, "the cache 'radix' has no separate memory for windows"),
        ("chunk", 100, "the cache 'chunk' has no separate memory for windows"),
        ("swa_radix", 20, "one request with a window of 16 tokens may need 24"),
    ],
)
def test_impossible_window_tokens_are_refused(workload, cache, window_tokens, message):
    path, *_ = workload("mistral")
    with pytest.raises(ConfigError, match=message):
        make_parts(path, cache={"name": cache}, memory={"kv_tokens": 1000, "window_tokens": window_tokens})


def test_a_model_without_windows_has_one_memory(tmp_path, caplog):
    path = write_tiny_checkpoint(tmp_path, "llama", num_layers=1, tokenizer=True)
    parts = make_parts(path, cache={"name": "swa_radix"}, memory={"kv_tokens": 100})
    assert parts.loop.scheduler.kv.window is None
    assert "no layer has a sliding window" in caplog.text
    parts.loop.close()
    with pytest.raises(ConfigError, match="cannot have a separate memory: no layer has a sliding window"):
        make_parts(path, cache={"name": "swa_radix"}, memory={"kv_tokens": 100, "window_tokens": 50})
