"""Engines whose model is split over processes: their outputs equal those of one process."""

import re

import numpy as np
import psutil
import pytest

from graftlm import Engine, SamplingParams
from graftlm.errors import AdapterError, ConfigError, EngineClosedError
from graftlm.testing.tiny_adapters import write_tiny_adapter
from graftlm.testing.tiny_models import write_tiny_checkpoint

pytestmark = pytest.mark.full

GREEDY = SamplingParams(temperature=0, max_tokens=12)
SHARED = 40

#: page size, tokens per step, cache, overlap, tokens of memory: chunks, retractions, and both sides of overlap
SETTINGS = [
    (1, 7, "radix", True, 224),
    (16, 64, "radix", False, 4096),
    (4, 2048, "chunk", True, 400),
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    return write_tiny_checkpoint(folder, "llama", vocab_size=322, num_kv_heads=2, num_heads=8, tokenizer=True)


@pytest.fixture(scope="module")
def prompts():
    rng = np.random.default_rng(5)
    shared = rng.integers(1, 300, SHARED).tolist()
    return [shared + rng.integers(1, 300, length).tolist() for length in (1, 2, 17, 60)] + [[7], [8, 9]]


def engine(path, parallel, setting=(4, 64, "radix", True, 1024), **sections):
    page_size, chunk, cache, overlap, kv_tokens = setting
    return Engine(
        model={"path": str(path), "dtype": "float32", "device": "cpu"},
        cache={"name": cache, "page_size": page_size},
        scheduling={"prefill_tokens_per_step": chunk, "overlap": overlap},
        memory={"kv_tokens": kv_tokens},
        parallel=parallel,
        debug=True,
        **sections,
    )


def outputs(one, prompts, params=GREEDY):
    return [
        [(list(c.token_ids), c.finish_reason, c.error) for c in output.completions]
        for output in one.generate(prompts, params)
    ]


@pytest.fixture(scope="module")
def expected(checkpoint, prompts):
    with engine(checkpoint, {}) as one:
        return outputs(one, prompts)


@pytest.mark.parametrize("tensor", [1, 2, 4])
@pytest.mark.parametrize("setting", SETTINGS)
def test_greedy_tokens_equal_those_of_one_process(checkpoint, prompts, expected, tensor, setting):
    with engine(checkpoint, {"tensor": tensor, "executor": "processes"}, setting) as ranks:
        assert outputs(ranks, prompts) == expected
        assert outputs(ranks, prompts) == expected  # with a full cache
    assert not [child for child in psutil.Process().children() if "graftlm.parallel" in child.cmdline()]


def test_everything_that_a_request_may_ask_for(checkpoint, prompts):
    """Grammars, seeds, penalties, log-probabilities, embeddings, drafts and forced tokens are those of one process."""
    seeded = SamplingParams(seed=3, max_tokens=16, n=2, logprobs=2, prompt_logprobs=1, repetition_penalty=1.2)
    schema = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "yy"]}}}
    constrained = SamplingParams(temperature=0, max_tokens=40, json_schema=schema)

    def run(one):
        texts = ["a small river", "the sea"]
        found = [completion for output in one.generate(texts, seeded) for completion in output.completions]
        logprobs = [[entry.logprob for entry in completion.logprobs] for completion in found]
        tokens = [list(completion.token_ids) for completion in found]
        tokens += [list(output.token_ids) for output in one.generate(texts, constrained)]
        tokens += [list(output.token_ids) for output in one.generate([[5, 6, 7] * 8], GREEDY)]
        vectors = [output.embedding for output in one.embed(texts)]
        return tokens, logprobs, vectors

    sections = {"speculation": "auto", "grammar": {"jump_forward": "fast"}}
    with engine(checkpoint, {}, **sections) as one:
        tokens, logprobs, vectors = run(one)
    with engine(checkpoint, {"tensor": 2}, **sections) as ranks:
        found = run(ranks)
    assert found[0] == tokens
    np.testing.assert_allclose(np.concatenate(found[1]), np.concatenate(logprobs), atol=1e-4)
    np.testing.assert_allclose(found[2], vectors, atol=1e-4)


def test_weights_are_read_replaced_and_released(checkpoint, prompts, expected, tmp_path):
    other = write_tiny_checkpoint(tmp_path, "llama", seed=9, vocab_size=322, num_heads=8, tokenizer=True)
    with engine(other, {}) as one:
        others = outputs(one, prompts)
    assert others != expected
    with engine(checkpoint, {"tensor": 2}) as ranks:
        name = "model.layers.0.self_attn.k_proj.weight"
        before = ranks.get_weight(name)
        assert before.shape == (32, 64)
        ranks.update_weights(str(other))
        assert outputs(ranks, prompts) == others
        assert not ranks.get_weight(name).equal(before)
        ranks.update_weights(str(checkpoint))
        assert outputs(ranks, prompts) == expected
        ranks.update_weights({name: before * 2})
        assert ranks.get_weight(name).equal(before * 2)
        ranks.update_weights({name: before})
        assert outputs(ranks, prompts) == expected


def test_adapters_are_split_and_loaded_while_the_engine_runs(checkpoint, prompts, tmp_path):
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    folders = []
    for seed in range(2):
        folders.append(tmp_path / f"adapter-{seed}")
        write_tiny_adapter(folders[-1], checkpoint, seed=seed, r=3, lora_alpha=6, target_modules=targets)
    adapters = ["first", None, "second", "first", None, "second"]

    def run(one):
        one.load_adapter("second", str(folders[1]))
        mixed = [list(output.token_ids) for output in one.generate(prompts, GREEDY, adapter=adapters)]
        one.unload_adapter("first")
        one.load_adapter("third", str(folders[0]))
        others = [list(output.token_ids) for output in one.generate(prompts, GREEDY, adapter="third")]
        with pytest.raises(AdapterError, match="No adapter at"):
            one.load_adapter("fourth", str(tmp_path / "missing"))
        return mixed, others

    lora = {"adapters": {"first": str(folders[0])}, "max_loaded": 2}
    with engine(checkpoint, {}, lora=lora) as one:
        expected = run(one)
    with engine(checkpoint, {"tensor": 2}, lora=lora) as ranks:
        assert run(ranks) == expected
    assert expected[0][0] == expected[1][0]
    assert expected[0][1] != expected[1][1]


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"parallel": {"tensor": 3}}, "cannot share num_attention_heads 8 and num_key_value_heads 2 equally"),
        ({"parallel": {"tensor": 2, "executor": "local"}}, "'local' cannot be used: it runs 1 rank, but"),
        ({"parallel": {"tensor": 2}, "cache": "hicache"}, "'hicache' has lower tiers, which are not supported"),
    ],
)
def test_what_cannot_be_split_is_refused_by_name(checkpoint, sections, message):
    with pytest.raises(ConfigError) as caught:
        Engine(model={"path": str(checkpoint), "device": "cpu"}, **sections)
    assert message in str(caught.value)


def test_the_transformers_fallback_is_refused_by_name(checkpoint):
    model = {"path": str(checkpoint), "device": "cpu", "architecture": "transformers"}
    with pytest.raises(ConfigError, match="the model 'transformers' cannot be split over ranks"):
        Engine(model=model, parallel={"tensor": 2})


def test_a_killed_rank_ends_the_engine_with_its_name(checkpoint):
    with engine(checkpoint, {"tensor": 2}) as ranks:
        (second,) = [child for child in psutil.Process().children() if "rank-1" in child.cmdline()[-1]]
        second.kill()
        try:
            (output,) = ranks.generate([[5, 6]], GREEDY)
            assert re.search(r"rank 1 \(pid \d+\): killed by SIGKILL", output.error)
        except EngineClosedError:
            pass  # the engine has noticed the end before the request
        ranks._thread.close()
        with pytest.raises(EngineClosedError):
            ranks.generate([[5, 6]], GREEDY)
