"""Requests whose common prefix is read once for all of them give Hugging Face's greedy tokens in float32."""

import numpy as np
import pytest

from graftlm import Engine, SamplingParams
from graftlm.testing.hugging_face import HuggingFaceModel
from graftlm_attention import native_paged

MAX_TOKENS = 10


@pytest.mark.parametrize(("page_size", "overlap"), [(1, True), (16, False)])
def test_greedy_tokens_equal_transformers(checkpoint, monkeypatch, page_size, overlap):
    rng = np.random.default_rng(3)
    first, second = rng.integers(1, 300, (2, 300)).tolist()
    prompts = [shared + rng.integers(1, 300, n).tolist() for n in (1, 9, 30, 4, 17) for shared in (first, second, [])]
    found, find = [], native_paged.find_shared_prefixes

    def spy(*args):
        found.append(find(*args))
        return found[-1]

    monkeypatch.setattr(native_paged, "find_shared_prefixes", spy)
    oracle = HuggingFaceModel(checkpoint("llama"))
    config = {
        "model": {"path": str(checkpoint("llama")), "dtype": "float32"},
        "cache": {"page_size": page_size},
        "scheduling": {"overlap": overlap},
        "memory": {"kv_tokens": 8192},
    }
    with Engine(config) as engine:
        engine.generate([first, second], SamplingParams(temperature=0, max_tokens=1))
        outputs = engine.generate(prompts, SamplingParams(temperature=0, max_tokens=MAX_TOKENS))
    assert [list(output.token_ids) for output in outputs] == [oracle.generate(prompt, MAX_TOKENS) for prompt in prompts]
    assert max(0 if shared is None else len(shared.lens) for shared in found) == 2
