"""Greedy tokens in float32 equal Hugging Face's for any pages, chunks, cache, overlap and memory."""

import itertools
import time

import numpy as np
import pytest

from graftlm.assembly.assemble import assemble
from graftlm.config import EngineConfig
from graftlm.contracts import Platform
from graftlm.registry import Registry
from graftlm.request_options import DEFAULT_OPTIONS, RequestOptions
from graftlm.testing.hugging_face import HuggingFaceModel
from graftlm.types import SamplingParams

MODELS = ["llama", "llama-mha-untied-rope3", "qwen2", "qwen3", "demo"]
NUM_REQUESTS = 60
#: Requests of the other models in the quick set, because Transformers takes most of the time.
FEW_REQUESTS = slice(12, 36)
LONGEST_PROMPT = 700
MAX_TOKENS = 16

PAGE_SIZES = [1, 16]
CHUNKS = [7, 64, 2048]
CACHES = ["radix", "chunk"]
OVERLAPS = [False, True]
SCARCE = [False, True]

#: For the first model: half of all combinations, with all triples and nearly all quadruples of values, of which the
#: quick set runs all pairs. For the other models: every pair of values at least once, in the quick set every value.
COMBINATIONS = list(itertools.product(*map(enumerate, (PAGE_SIZES, CHUNKS, CACHES, OVERLAPS, SCARCE))))
ALL = [tuple(value for _, value in values) for values in COMBINATIONS if sum(i for i, _ in values) % 2 == 0]
SOME = [
    (1, 7, "radix", True, True),
    (1, 64, "chunk", False, True),
    (1, 2048, "radix", False, False),
    (16, 7, "chunk", False, False),
    (16, 64, "radix", True, False),
    (16, 2048, "chunk", True, True),
    (16, 64, "radix", False, True),
]
FEW = SOME[:4]  # every value at least once, for models that differ little from one with more cases
OTHERS = [(model, *case) for model in MODELS[1:] for case in (SOME if model in ("demo", "qwen3") else FEW)]


def make_prompts(vocab_size):
    """Return 60 prompts of 1 to 700 tokens; two thirds start with one of two common prefixes."""
    rng = np.random.default_rng(7)
    prefixes = [rng.integers(1, vocab_size, n).tolist() for n in (50, 130)]
    prompts = []
    for i in range(NUM_REQUESTS - 2):
        own = rng.integers(1, vocab_size, int(10 ** rng.uniform(0, 2.2))).tolist()
        prompts.append((prefixes[i % 3] if i % 3 < 2 else []) + own)
    longest = rng.integers(1, vocab_size, LONGEST_PROMPT).tolist()
    return [*prompts[:30], longest, *prompts[30:], [int(rng.integers(1, vocab_size))]]


@pytest.fixture(scope="module")
def workload(checkpoint, request):
    """Return a function from a model's name to its prompts and Hugging Face's answers."""
    answers = {}
    full = request.config.getoption("--full")

    def get(name):
        if name not in answers:
            oracle = HuggingFaceModel(checkpoint(name))
            prompts = make_prompts(300)[slice(None) if full or name == MODELS[0] else FEW_REQUESTS]
            answers[name] = (prompts, [oracle.generate(prompt, MAX_TOKENS) for prompt in prompts])
        return answers[name]

    return get


class Run:
    """An engine's parts, run step by step so that requests arrive while others run."""

    def __init__(self, path, **config):
        settings = EngineConfig.load(
            {"model": {"path": str(path), "dtype": "float32", "device": "cpu"}, "debug": True}, **config
        )
        self.parts = assemble(settings, Registry.load(settings.plugins), Platform("cpu"))
        self.tokens = {}
        self.finishes = {}

    def add(self, request_id, prompt, params, options=DEFAULT_OPTIONS):
        intake = self.parts.intake
        self.parts.loop.scheduler.add(intake.request(request_id, intake.check_prompt(prompt), params, options))
        self.tokens[request_id] = []

    def step(self):
        for update in self.parts.loop.step():
            self.tokens[update.request_id] += update.token_ids
            if update.finish is not None:
                self.finishes[update.request_id] = (update.finish, update.usage)

    def drain(self):
        limit = time.monotonic() + 120
        while self.parts.loop.scheduler.has_work:
            self.step()
            assert time.monotonic() < limit, "the engine does not come to an end"

    def close(self):
        self.parts.loop.close()


@pytest.mark.covering
@pytest.mark.parametrize(("page_size", "chunk", "cache", "overlap", "scarce"), ALL)
def test_greedy_tokens_equal_transformers(checkpoint, workload, page_size, chunk, cache, overlap, scarce):
    check_greedy_tokens(checkpoint, workload, "llama", page_size, chunk, cache, overlap, scarce)


@pytest.mark.covering(strength=1)
@pytest.mark.parametrize(("model", "page_size", "chunk", "cache", "overlap", "scarce"), OTHERS)
def test_greedy_tokens_of_other_models_equal_transformers(
    checkpoint, workload, model, page_size, chunk, cache, overlap, scarce
):
    check_greedy_tokens(checkpoint, workload, model, page_size, chunk, cache, overlap, scarce)


def check_greedy_tokens(checkpoint, workload, model, page_size, chunk, cache, overlap, scarce):
    prompts, answers = workload(model)
    run = Run(
        checkpoint(model),
        cache={"name": cache, "page_size": page_size},
        scheduling={"prefill_tokens_per_step": chunk, "overlap": overlap, "max_running_requests": 16},
        memory={"kv_tokens": (736 if page_size == 1 else 720) if scarce else 16384},
    )
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
    waves = [0, 20, 40, 60]
    for first, last in itertools.pairwise(waves):
        for i in range(first, min(last, len(prompts))):
            run.add(str(i), prompts[i], params)
        for _ in range(8):
            run.step()
    run.drain()
    run.close()
    for i, expected in enumerate(answers):
        assert run.tokens[str(i)] == expected, f"request {i}, prompt of {len(prompts[i])} tokens"
    stats = run.parts.loop.stats()
    if model == "llama" and scarce and chunk > 7:  # the other requests end early, and with small chunks few run at once
        assert stats.retractions > 0
    assert (stats.cached_tokens > 0) == (cache == "radix")
    assert stats.owned_pages == stats.locked_pages == 0


@pytest.mark.parametrize(("page_size", "overlap"), [(1, False), (1, True), (16, True)])
def test_preempted_requests_generate_the_same_greedy_tokens(checkpoint, workload, page_size, overlap):
    """Each group of requests has a higher priority than the previous one, which occupies every row."""
    prompts, answers = workload("llama")
    run = Run(
        checkpoint("llama"),
        cache={"page_size": page_size},
        scheduling={"policy": "priority", "overlap": overlap, "max_running_requests": 4, "prefill_tokens_per_step": 64},
        memory={"kv_tokens": 736},
    )
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
    for i, prompt in enumerate(prompts[:30]):
        run.add(str(i), prompt, params, RequestOptions(priority=i // 4))
        if i % 4 == 3:
            for _ in range(6):
                run.step()
    run.drain()
    run.close()
    for i, expected in enumerate(answers[:30]):
        assert run.tokens[str(i)] == expected, f"request {i}, prompt of {len(prompts[i])} tokens"
    stats = run.parts.loop.stats()
    assert stats.retractions >= 4
    assert stats.owned_pages == stats.locked_pages == 0


@pytest.mark.parametrize("page_size", [1, 16])
def test_in_a_second_run_every_full_page_except_the_last_token_is_cached(checkpoint, workload, page_size):
    prompts, answers = workload("qwen3")
    run = Run(checkpoint("qwen3"), cache={"page_size": page_size}, memory={"kv_tokens": 32768})
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
    for round_ in ("first", "second"):
        for i, prompt in enumerate(prompts):
            run.add(f"{round_}-{i}", prompt, params)
        run.drain()
    run.close()
    for i, prompt in enumerate(prompts):
        _, usage = run.finishes[f"second-{i}"]
        assert usage.cached_tokens == (len(prompt) - 1) // page_size * page_size
        assert run.tokens[f"second-{i}"] == run.tokens[f"first-{i}"] == answers[i]
