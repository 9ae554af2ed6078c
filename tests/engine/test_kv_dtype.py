"""An engine with an int8 KV cache: its tokens, the log line about its size, and refused dtypes."""

import logging

import numpy as np
import pytest

from graftlm import Engine, SamplingParams
from graftlm.config import EngineConfig
from graftlm.errors import ConfigError, GraftlmError
from graftlm.layers import encode_int8
from graftlm.testing.hugging_face import HuggingFaceModel

MAX_TOKENS = 10
PROMPT_LENS = (1, 9, 40, 70)
GREEDY = SamplingParams(max_tokens=MAX_TOKENS, temperature=0, ignore_eos=True)


def engine_of(folder, **sections):
    config = {"model": {"path": str(folder), "dtype": "float32"}, "memory": {"kv_tokens": 1024, "kv_dtype": "int8"}}
    return Engine(EngineConfig(**{**config, **sections}))


def held_in_int8(rows):
    """Return the numbers that attention reads after rows [..., D] were stored in int8."""
    codes, scales = encode_int8(rows)
    return codes * scales.float().unsqueeze(-1)


@pytest.fixture(scope="module")
def prompts():
    rng = np.random.default_rng(5)
    return [rng.integers(1, 300, size).tolist() for size in PROMPT_LENS]


@pytest.fixture(scope="module")
def oracle(checkpoint, prompts):
    """Return a function from a checkpoint's name to the tokens of Transformers with an int8 cache."""
    answers = {}

    def ask(name):
        if name not in answers:
            model = HuggingFaceModel(checkpoint(name))
            answers[name] = [model.generate(prompt, MAX_TOKENS, held=held_in_int8) for prompt in prompts]
        return answers[name]

    return ask


@pytest.mark.parametrize(
    ("model", "kernel", "page_size", "prefill_tokens"),
    [
        ("llama", "native", 1, 2048),
        ("llama", "native", 16, 24),
        ("llama", "torch", 16, 2048),
        ("llama", "torch", 1, 24),
        ("mistral", "native", 16, 24),  # with windows
        ("gemma2", "native", 1, 24),  # with windows and soft caps
    ],
)
def test_tokens_equal_those_of_transformers_with_an_int8_cache(
    checkpoint, prompts, oracle, model, kernel, page_size, prefill_tokens
):
    engine = engine_of(
        checkpoint(model),
        attention={"name": "torch_native", "options": {"kernel": kernel}},
        cache={"name": "radix", "page_size": page_size},
        scheduling={"prefill_tokens_per_step": prefill_tokens},
    )
    with engine:
        first = engine.generate(prompts, GREEDY)
        again = engine.generate(prompts, GREEDY)  # with the cached prefixes of the first run
    assert [list(output.token_ids) for output in first] == oracle(model)
    assert [list(output.token_ids) for output in again] == oracle(model)
    assert again[-1].usage.cached_tokens >= 64


def test_int8_blocks_reload_unchanged_from_host_memory(checkpoint, prompts, oracle):
    cache = {"name": "hicache", "page_size": 4, "options": {"host_tokens": 2048, "block_tokens": 8}}
    rng = np.random.default_rng(6)
    others = [rng.integers(1, 300, 90).tolist() for _ in range(4)]
    memory = {"kv_tokens": 160, "kv_dtype": "int8"}  # the memory is too small for the blocks of two other prompts
    with engine_of(checkpoint("llama"), cache=cache, memory=memory) as engine:
        engine.generate(prompts, GREEDY)
        engine.generate(others, GREEDY)
        [again] = engine.generate(prompts[-1:], GREEDY)
    assert list(again.token_ids) == oracle("llama")[-1]
    assert again.usage.cached_tokens_by_tier["host"] > 0


def test_the_log_line_has_the_number_of_tokens_and_the_gain_over_the_models_dtype(checkpoint, caplog):
    with (
        caplog.at_level(logging.INFO, "graftlm.assembly.kv_memory"),
        engine_of(checkpoint("llama"), model={"path": str(checkpoint("llama")), "dtype": "bfloat16"}),
    ):
        pass
    # 2 layers, 2 heads; a key and a value each take 16 bytes of codes and a scale of 2 bytes
    assert "KV memory: 1,024 tokens of 144 bytes in int8, 1.78 times as many as in bfloat16, " in caplog.text


@pytest.mark.parametrize(
    ("attention", "error", "message"),
    [
        (
            "torch_native",
            ConfigError,
            "attention backend 'torch_native' does not fit this engine: it supports a KV cache in the model's dtype or "
            "int8, but memory.kv_dtype is fp8. Set attention.name.",
        ),
        ("auto", GraftlmError, "it supports a KV cache in the model's dtype or int8, but memory.kv_dtype is fp8"),
    ],
)
def test_a_kv_dtype_that_no_backend_reads_is_refused(checkpoint, attention, error, message):
    with pytest.raises(error) as caught:
        engine_of(checkpoint("llama"), attention=attention, memory={"kv_tokens": 256, "kv_dtype": "fp8"})
    assert message in str(caught.value)
