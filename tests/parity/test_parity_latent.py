"""Latent attention and attention sinks in a whole engine: greedy tokens in float32 equal Hugging Face's."""

import numpy as np
import pytest

from graftlm import Engine, SamplingParams
from graftlm.testing.hugging_face import HuggingFaceModel

MODELS = ["deepseek_v2", "gpt_oss"]  # windows have 16 tokens
PROMPT_LENS = [1, 17, 80, 100, 130]
SHARED_LEN = 60  # number of tokens in the common prefix of all longer prompts
GREEDY = SamplingParams(temperature=0, max_tokens=6)

#: page size, tokens per step, cache, overlap, memory is scarce, kernel
CASES = [
    (1, 16, "radix", True, True, "native"),
    (1, 2048, "radix", False, False, "torch"),
    (16, 64, "radix", True, False, "native"),
    (16, 13, "chunk", False, True, "torch"),
]


@pytest.fixture(scope="module")
def workload(checkpoint):
    """Return a function from a model's name to its prompts and Hugging Face's answers."""
    answers = {}

    def get(name):
        if name not in answers:
            rng = np.random.default_rng(4)
            shared = rng.integers(1, 300, SHARED_LEN).tolist()
            drawn = [rng.integers(1, 300, length).tolist() for length in PROMPT_LENS]
            prompts = [shared + prompt[SHARED_LEN:] if len(prompt) > SHARED_LEN else prompt for prompt in drawn]
            oracle = HuggingFaceModel(checkpoint(name))
            answers[name] = (prompts, [oracle.generate(prompt, GREEDY.max_tokens) for prompt in prompts])
        return answers[name]

    return get


@pytest.mark.covering(strength=1)
@pytest.mark.parametrize(("page_size", "chunk", "cache", "overlap", "scarce", "kernel"), CASES)
@pytest.mark.parametrize("model", MODELS)
def test_greedy_tokens_equal_transformers(
    checkpoint, workload, model, page_size, chunk, cache, overlap, scarce, kernel
):
    prompts, answers = workload(model)
    engine = Engine(
        model={"path": str(checkpoint(model)), "dtype": "float32", "device": "cpu"},
        attention={"name": "torch_native", "options": {"kernel": kernel}},
        cache={"name": cache, "page_size": page_size},
        scheduling={"prefill_tokens_per_step": chunk, "overlap": overlap},
        memory={"kv_tokens": 224 if scarce else 8192},
        debug=True,
    )
    with engine:
        for _ in range(2):  # the second run reads from the cache, if it keeps anything
            assert [list(output.token_ids) for output in engine.generate(prompts, GREEDY)] == answers
        stats = engine.stats()
    assert (stats.cached_tokens > 0) == (cache == "radix")


def test_latent_vectors_are_reloaded_from_host_memory(checkpoint, workload):
    prompts, answers = workload("deepseek_v2")
    engine = Engine(
        model={"path": str(checkpoint("deepseek_v2")), "dtype": "float32", "device": "cpu"},
        cache={"name": "hicache", "page_size": 4, "options": {"host_tokens": 4096}},
        memory={"kv_tokens": 160},
        debug=True,
    )
    with engine:
        for _ in range(2):  # 328 tokens, of which the device holds 160
            outputs = engine.generate(prompts, GREEDY)
            assert [list(output.token_ids) for output in outputs] == answers
    assert sum(output.usage.cached_host_tokens for output in outputs) > 0
