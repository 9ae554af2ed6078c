"""Families with experts, and Phi, in a whole engine: greedy tokens in float32 equal Hugging Face's.

test_parity.py and test_parity_windows.py turn every knob of the engine with models whose layers cost less.
"""

import numpy as np
import pytest

from graftlm import Engine, SamplingParams
from graftlm.testing.hugging_face import HuggingFaceModel
from graftlm.testing.tiny_models import write_tiny_checkpoint

PROMPT_LENS = [1, 2, 17, 33, 64, 100, 140, 180]
SHARED_LEN = 50  # number of tokens in the common prefix of all longer prompts
GREEDY = SamplingParams(temperature=0, max_tokens=12)

#: page size, tokens per step, cache, overlap, tokens of memory
SETTINGS = [
    (1, 7, "radix", True, 224),
    (16, 64, "radix", False, 4096),
    (4, 2048, "chunk", True, 400),
]
MODELS = ["mixtral", "qwen2-moe", "qwen3-moe", "phi3"]


@pytest.fixture(scope="module")
def workload(checkpoint):
    """Return a function from a model's name to its prompts and Hugging Face's answers."""
    answers = {}

    def get(name):
        if name not in answers:
            rng = np.random.default_rng(11)
            shared = rng.integers(1, 300, SHARED_LEN).tolist()
            drawn = [rng.integers(1, 300, length).tolist() for length in PROMPT_LENS]
            prompts = [shared + prompt[SHARED_LEN:] if len(prompt) > SHARED_LEN else prompt for prompt in drawn]
            oracle = HuggingFaceModel(checkpoint(name))
            answers[name] = (prompts, [oracle.generate(prompt, GREEDY.max_tokens) for prompt in prompts])
        return answers[name]

    return get


@pytest.mark.covering(strength=1)
@pytest.mark.parametrize(("page_size", "chunk", "cache", "overlap", "kv_tokens"), SETTINGS)
@pytest.mark.parametrize("model", MODELS)
def test_greedy_tokens_equal_transformers(checkpoint, workload, model, page_size, chunk, cache, overlap, kv_tokens):
    prompts, answers = workload(model)
    engine = Engine(
        model={"path": str(checkpoint(model)), "dtype": "float32", "device": "cpu"},
        cache={"name": cache, "page_size": page_size},
        scheduling={"prefill_tokens_per_step": chunk, "overlap": overlap},
        memory={"kv_tokens": kv_tokens},
        debug=True,
    )
    with engine:
        assert [list(output.token_ids) for output in engine.generate(prompts, GREEDY)] == answers


@pytest.mark.parametrize(
    ("context_len", "prompt_lens"),
    [(64, (1, 20, 52)), (None, (66, 90, 140))],  # with their answers: at most as long as in training, and longer
)
def test_longrope_equals_transformers_below_and_above_its_limit(tmp_path, context_len, prompt_lens):
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [1.0 + i for i in range(8)]}
    config = {"original_max_position_embeddings": 64}
    write_tiny_checkpoint(tmp_path, "phi3", tokenizer=True, rope_parameters=rope, config=config)
    oracle = HuggingFaceModel(tmp_path)
    rng = np.random.default_rng(12)
    prompts = [rng.integers(1, 300, length).tolist() for length in prompt_lens]
    model = {"path": str(tmp_path), "dtype": "float32", "device": "cpu", "context_len": context_len}
    with Engine(model=model, scheduling={"prefill_tokens_per_step": 48}, memory={"kv_tokens": 512}) as engine:
        got = [list(output.token_ids) for output in engine.generate(prompts, GREEDY)]
    assert got == [oracle.generate(prompt, GREEDY.max_tokens) for prompt in prompts]
