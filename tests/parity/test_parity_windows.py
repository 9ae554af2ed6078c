"""Models with sliding windows, in contexts of many windows: greedy tokens in float32 equal Hugging Face's."""

import numpy as np
import pytest

from graftlm import Engine, SamplingParams
from graftlm.testing.hugging_face import HuggingFaceModel

MODELS = ["mistral", "gemma2", "gemma3"]  # every window has 16 tokens
PROMPT_LENS = [1, 15, 16, 17, 33, 100, 128, 150, 190, 260]
SHARED_LEN = 90  # number of tokens in the common prefix of all longer prompts
GREEDY = SamplingParams(temperature=0, max_tokens=16)

#: page size, tokens per step, cache, overlap, whether memory is scarce, kernel; every pair of values occurs at least
#: once.
CASES = [
    (1, 7, "radix", True, True, "native"),
    (1, 64, "chunk", False, True, "torch"),
    (1, 2048, "radix", True, False, "torch"),
    (4, 7, "chunk", True, False, "torch"),
    (4, 64, "radix", True, True, "native"),
    (4, 2048, "chunk", False, True, "native"),
    (16, 7, "radix", False, True, "torch"),
    (16, 64, "radix", False, False, "native"),
    (16, 2048, "chunk", True, True, "torch"),
]


@pytest.fixture(scope="module")
def workload(checkpoint):
    """Return a function from a model's name to its prompts and Hugging Face's answers."""
    answers = {}

    def get(name):
        if name not in answers:
            rng = np.random.default_rng(3)
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
        memory={"kv_tokens": 288 if scarce else 8192},
        debug=True,
    )
    with engine:
        for _ in range(2):  # the second run reads from the cache, if it keeps anything
            assert [list(output.token_ids) for output in engine.generate(prompts, GREEDY)] == answers
        stats = engine.stats()
    assert (stats.cached_tokens > 0) == (cache == "radix")
    if scarce and chunk > 7 and page_size < 16:  # with small chunks and so few pages, few requests run at once
        assert stats.retractions > 0
