"""Seeded samples are the same alone, in a batch and after a retraction, with overlap on or off."""

import pytest

from graftlm import Engine, SamplingParams

PROMPT = "Once there was a fox who"
VARIED = [
    {"temperature": 1.0},
    {"temperature": 1.7, "top_k": 40},
    {"temperature": 1.2, "top_p": 0.8},
    {"temperature": 1.5, "min_p": 0.02},
    {"temperature": 1.0, "repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.3},
    {"temperature": 1.3, "top_k": 100, "top_p": 0.9, "logit_bias": {50: 2.0}, "min_tokens": 10},
]


def params(i, max_tokens=48):
    return SamplingParams(seed=1000 + i, max_tokens=max_tokens, ignore_eos=True, **VARIED[i % len(VARIED)])


@pytest.fixture(scope="module")
def alone():
    """The tokens of each of 32 seeded requests when it runs alone."""
    with Engine(model="demo", scheduling={"overlap": False}) as engine:
        return [engine.generate(f"{PROMPT} {i}", params(i))[0].token_ids for i in range(32)]


@pytest.mark.parametrize("overlap", [False, True])
def test_a_seeded_sample_is_equal_in_a_batch_of_32(alone, overlap):
    with Engine(model="demo", scheduling={"overlap": overlap}) as engine:
        outputs = engine.generate([f"{PROMPT} {i}" for i in range(32)], [params(i) for i in range(32)])
    assert [output.token_ids for output in outputs] == alone


@pytest.mark.covering(strength=1)
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("page_size", [1, 16])
def test_a_seeded_sample_is_equal_after_a_retraction(alone, overlap, page_size):
    with Engine(
        model="demo",
        cache={"page_size": page_size},
        memory={"kv_tokens": 512},
        scheduling={"overlap": overlap},
        debug=True,
    ) as engine:
        outputs = engine.generate([f"{PROMPT} {i}" for i in range(32)], [params(i) for i in range(32)])
        assert engine.stats().retractions > 0
    assert [output.token_ids for output in outputs] == alone


def test_samples_differ_between_seeds_and_unseeded_calls():
    with Engine(model="demo") as engine:
        seeded = engine.generate([PROMPT] * 6, [SamplingParams(seed=i, temperature=2.0) for i in range(6)])
        assert len({output.token_ids for output in seeded}) == 6
        unseeded = engine.generate([PROMPT] * 6, SamplingParams(temperature=2.0))
        assert len({output.token_ids for output in unseeded}) == 6


def test_a_low_temperature_gives_the_greedy_tokens():
    with Engine(model="demo") as engine:
        greedy, cold = engine.generate(
            [PROMPT] * 2, [SamplingParams(temperature=0), SamplingParams(temperature=0.001, seed=1)]
        )
    assert cold.token_ids == greedy.token_ids
