"""Log-probabilities of prompts equal those of Transformers for any pages, chunks and cached tokens."""

import numpy as np
import pytest

from graftlm import Engine, SamplingParams
from graftlm.testing.hugging_face import HuggingFaceModel

STARTS = [0, 1, 2, 32, 97, 119, 120, 500]
LENGTH = 120
#: One list of `logprob_token_ids` for each start.
REQUESTED = [(), (5,), (7, 5, 7), (249, 3), (), (9, 8, 7, 6), (4,), (1, 2)]

#: (model, page size, chunk, overlap); every pair of values occurs once.
CASES = [
    ("llama", 1, 7, False),
    ("llama", 1, 2048, True),
    ("llama", 16, 7, True),
    ("llama", 16, 2048, False),
    ("qwen3", 16, 50, True),
]


@pytest.fixture(scope="module")
def expected(checkpoint):
    """Return a function from a model's name to a prompt and the log-softmax of its logits, [tokens, V]."""
    known = {}

    def of(name):
        if name not in known:
            oracle = HuggingFaceModel(checkpoint(name))
            prompt = np.random.default_rng(3).integers(3, 250, LENGTH).tolist()
            known[name] = prompt, oracle.logits(prompt).log_softmax(-1)
        return known[name]

    return of


@pytest.mark.parametrize(("model", "page_size", "chunk", "overlap"), CASES)
def test_prompt_logprobs_equal_transformers_from_any_start(checkpoint, expected, model, page_size, chunk, overlap):
    prompt, logprobs = expected(model)
    options = {"prefill_tokens_per_step": chunk, "overlap": overlap}
    with Engine(
        model=str(checkpoint(model)), cache={"page_size": page_size}, scheduling=options, memory={"kv_tokens": 2048}
    ) as engine:
        params = [
            SamplingParams(
                temperature=0, max_tokens=2, prompt_logprobs=2, prompt_logprobs_start=start, logprob_token_ids=ids
            )
            for start, ids in zip(STARTS, REQUESTED, strict=True)
        ]
        cold = [engine.generate([prompt], p)[0] for p in params[3:4]]  # nothing is cached
        warm = engine.generate([prompt] * len(params), params)  # together, some from the cache
        plain = engine.generate([prompt] * 3, SamplingParams(temperature=0, max_tokens=2))
    assert cold[0].usage.cached_tokens == 0
    all_ids = [REQUESTED[3], *REQUESTED]
    for start, ids, output in zip([STARTS[3], *STARTS], all_ids, [*cold, *warm], strict=True):
        first = min(max(start, 1), LENGTH)
        assert output.prompt_logprobs[:first] == (None,) * first
        assert len(output.prompt_logprobs) == LENGTH
        for position, entry in enumerate(output.prompt_logprobs[first:], start=first):
            assert entry.token_id == prompt[position]
            assert entry.logprob == pytest.approx(logprobs[position - 1, prompt[position]].item(), abs=1e-4)
            assert [i for i, _ in entry.top] == logprobs[position - 1].topk(2).indices.tolist()
            assert entry.requested == pytest.approx(logprobs[position - 1, list(ids)].tolist(), abs=1e-4)
        assert output.token_ids == plain[0].token_ids
    reusable = [min(max(start - 1, 0), LENGTH - 1) // page_size * page_size for start in STARTS]
    assert [output.usage.cached_tokens for output in warm] == reusable
    assert {output.usage.cached_tokens for output in plain} == {(LENGTH - 1) // page_size * page_size}


def test_a_window_cache_reuses_the_tokens_before_the_start(checkpoint, expected):
    prompt, logprobs = expected("gemma3")
    with Engine(model=str(checkpoint("gemma3")), memory={"kv_tokens": 2048}) as engine:
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, prompt_logprobs_start=100)
        outputs = engine.generate([prompt] * 2, params) + engine.generate([prompt], params)
    for output in outputs:
        for position, entry in enumerate(output.prompt_logprobs[100:], start=100):
            assert entry.logprob == pytest.approx(logprobs[position - 1, prompt[position]].item(), abs=1e-4)
    assert outputs[-1].usage.cached_tokens > 0
