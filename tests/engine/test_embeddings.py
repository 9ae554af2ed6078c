"""Embeddings equal the pooled last hidden states of Transformers, with any settings and other load."""

import asyncio

import numpy as np
import pytest
import torch
from transformers import AutoModel

from graftlm import Engine, SamplingParams
from graftlm.errors import (
    InvalidPromptError,
    NeverFitsError,
    PromptTooLongError,
    RequestError,
    RequestFailedError,
    SamplingParamsError,
)
from graftlm.intake import Intake, IntakeLimits
from graftlm.pooling.pooling import MEAN
from graftlm.request_options import RequestOptions

LENGTHS = [1, 2, 7, 8, 16, 33, 64, 100, 129, 240]


@pytest.fixture(scope="module")
def expected(checkpoint):
    """Return a function from a checkpoint's name to [(prompt, mean, last)], float32."""
    known = {}

    def get(name):
        if name not in known:
            model = AutoModel.from_pretrained(checkpoint(name), dtype=torch.float32)
            rng = np.random.default_rng(5)
            known[name] = []
            for length in LENGTHS:
                prompt = rng.integers(3, model.config.vocab_size, length).tolist()
                with torch.inference_mode():
                    hidden = model(input_ids=torch.tensor([prompt])).last_hidden_state[0].double().numpy()
                known[name].append((prompt, hidden.mean(axis=0), hidden[-1]))
        return known[name]

    return get


def check(engine, cases):
    prompts = [prompt for prompt, _, _ in cases]
    for pooling, column in (("mean", 1), ("last", 2), ("mean", 1)):
        outputs = engine.embed(prompts, pooling=pooling, normalize=False)
        for output, case in zip(outputs, cases, strict=True):
            assert output.embedding.dtype == np.float32
            np.testing.assert_allclose(output.embedding, case[column], atol=2e-4, rtol=2e-4)
            assert output.usage.prompt_tokens == len(case[0])
            assert output.usage.completion_tokens == 0
            if pooling == "mean":
                assert output.usage.cached_tokens == 0


@pytest.mark.covering
@pytest.mark.parametrize("chunk", [7, 64, 2048])
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize(("cache", "overlap"), [("radix", True), ("radix", False), ("chunk", True)])
def test_llama_embeddings_equal_transformers(checkpoint, expected, chunk, page_size, cache, overlap):
    settings = {
        "cache": {"name": cache, "page_size": page_size},
        "scheduling": {"prefill_tokens_per_step": chunk, "overlap": overlap},
        "memory": {"kv_tokens": 4096},
        "debug": True,
    }
    with Engine(model={"path": str(checkpoint("llama")), "dtype": "float32"}, **settings) as engine:
        check(engine, expected("llama"))


@pytest.mark.parametrize("name", ["llama-mha-untied-rope3", "qwen2", "qwen3", "demo"])
def test_other_models_embeddings_equal_transformers(checkpoint, expected, name):
    settings = {"scheduling": {"prefill_tokens_per_step": 50}, "memory": {"kv_tokens": 4096}, "debug": True}
    with Engine(model={"path": str(checkpoint(name)), "dtype": "float32"}, **settings) as engine:
        check(engine, expected(name))


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_a_prompt_may_fill_the_whole_context_and_memory(checkpoint, pooling):
    path = checkpoint("llama")
    prompt = np.random.default_rng(6).integers(3, 256, 1024)
    with torch.inference_mode():
        model = AutoModel.from_pretrained(path, dtype=torch.float32)
        hidden = model(input_ids=torch.from_numpy(prompt)[None]).last_hidden_state[0].numpy()
    settings = {"cache": {"page_size": 16}, "memory": {"kv_tokens": 1024}, "debug": True}
    with Engine(model={"path": str(path), "dtype": "float32"}, **settings) as engine:
        (output,) = engine.embed([prompt.tolist()], pooling=pooling, normalize=False)
        np.testing.assert_allclose(
            output.embedding, hidden.mean(axis=0) if pooling == "mean" else hidden[-1], atol=2e-4, rtol=2e-4
        )
        with pytest.raises(PromptTooLongError, match=r"length is 1024 tokens; the prompt has 1025 tokens\. Shorten"):
            engine.embed([[*prompt.tolist(), 5]], pooling=pooling)
        with pytest.raises(PromptTooLongError, match="1024 tokens, one of them for output"):
            engine.generate([prompt.tolist()])


def test_a_prompt_beyond_the_memory_is_refused(checkpoint):
    settings = {"memory": {"kv_tokens": 100}}
    with Engine(model={"path": str(checkpoint("llama")), "dtype": "float32"}, **settings) as engine:
        assert len(engine.embed([[5] * 100])) == 1
        with pytest.raises(NeverFitsError, match=r"101 prompt tokens .* Shorten the prompt or raise memory\.kv_tokens"):
            engine.embed([[5] * 101])


def test_embeddings_are_right_beside_generation_in_little_memory(checkpoint, expected):
    cases = expected("llama")
    settings = {"scheduling": {"prefill_tokens_per_step": 40}, "memory": {"kv_tokens": 400}, "debug": True}
    with Engine(model={"path": str(checkpoint("llama")), "dtype": "float32"}, **settings) as engine:
        params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
        prompts = [[i, i + 1, i + 2] * 10 for i in range(5, 17)]
        alone = [engine.generate(prompt, params)[0].token_ids for prompt in prompts]
        engine.flush_cache()

        async def both():
            return await asyncio.gather(
                engine.agenerate(prompts, params),
                engine.aembed([case[0] for case in cases], normalize=False),
                engine.aembed([case[0] for case in cases], normalize=False, pooling="last", priority=1),
            )

        generated, mean, last = asyncio.run(both())
        assert [output.token_ids for output in generated] == alone
        assert engine.stats().retractions > 0
        for i, case in enumerate(cases):
            np.testing.assert_allclose(mean[i].embedding, case[1], atol=2e-4, rtol=2e-4)
            np.testing.assert_allclose(last[i].embedding, case[2], atol=2e-4, rtol=2e-4)


@pytest.fixture(scope="module")
def engine():
    with Engine(model="demo", memory={"kv_tokens": 4096}) as it:
        yield it


def test_vectors_have_unit_length_by_default(engine):
    (unit,) = engine.embed("The capital of France")
    (raw,) = engine.embed("The capital of France", normalize=False)
    assert np.linalg.norm(unit.embedding) == pytest.approx(1, abs=1e-6)
    np.testing.assert_allclose(raw.embedding / np.linalg.norm(raw.embedding), unit.embedding, atol=1e-6)


def test_the_last_token_may_reuse_a_prefix(engine):
    prompt = list(range(300, 400))
    first = engine.embed(prompt, pooling="last", cache_salt="x")[0]
    second = engine.embed(prompt, pooling="last", cache_salt="x")[0]
    assert (first.usage.cached_tokens, second.usage.cached_tokens) == (0, 99)
    np.testing.assert_allclose(first.embedding, second.embedding, atol=1e-5)


def test_text_and_chats_can_be_embedded(engine):
    outputs = engine.embed(["a fox", [{"role": "user", "content": "a fox"}], [300, 301]])
    assert len({output.embedding.tobytes() for output in outputs}) == 3
    assert engine.embed([]) == []


def test_an_embedding_that_times_out_raises_and_others_continue(engine):
    with pytest.raises(RequestFailedError, match="timed out"):
        engine.embed(["x"], timeout_s=1e-9)
    assert len(engine.embed(["x"])) == 1


@pytest.mark.parametrize("params", [{"n": 2}, {"prompt_logprobs": 0}])
def test_parameters_for_generation_are_refused_for_an_embedding(params):
    intake = Intake(IntakeLimits(100, 100, 100, ()), lambda _: None, lambda: 0.0)
    prompt = intake.check_prompt([1, 2], pooling=MEAN)
    with pytest.raises(SamplingParamsError, match="one vector"):
        intake.request("e", prompt, SamplingParams(**params), RequestOptions(pooling=MEAN))


@pytest.mark.parametrize(
    ("prompt", "arguments", "error"),
    [
        ("", {}, InvalidPromptError),
        ([], {}, InvalidPromptError),
        ([10**7], {}, InvalidPromptError),
        ([5] * 5000, {}, PromptTooLongError),
        ("x", {"pooling": "max"}, RequestError),
        ("x", {"pooling": "scores"}, RequestError),
        ("x", {"pooling": 1}, RequestError),
        ("x", {"dimensions": 0}, RequestError),
        ("x", {"dimensions": 10**6}, RequestError),
        ("x", {"priority": "high"}, RequestError),
    ],
)
def test_wrong_arguments_are_refused(engine, prompt, arguments, error):
    with pytest.raises(error):
        engine.embed([prompt], **arguments)
