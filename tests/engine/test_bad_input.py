"""Bad input raises one typed error with a clear message, and other requests continue."""

import json
import shutil
import threading

import pytest

from graftlm import Engine, SamplingParams
from graftlm.errors import (
    CheckpointError,
    ConfigError,
    InvalidPromptError,
    NeverFitsError,
    PromptTooLongError,
    RequestError,
    SamplingParamsError,
    UnknownProviderError,
    UnsupportedArchitectureError,
    UnsupportedFeatureError,
    WeightError,
)
from graftlm.testing.tiny_models import write_tiny_checkpoint


@pytest.fixture(scope="module")
def engine():
    with Engine(model="demo", debug=True) as engine:
        yield engine


BAD_PROMPTS = [
    ("", InvalidPromptError, "the prompt is empty"),
    ([[{"role": "user"}]], InvalidPromptError, "chat message 0 has no content"),
    ([[{"content": "a"}]], InvalidPromptError, "chat message 0 needs a role"),
    ([[]], InvalidPromptError, "the prompt is empty"),
    ([[5, 99999]], InvalidPromptError, "token id 99999 is outside the vocabulary of 2048"),
    ([[-1]], InvalidPromptError, "token id -1 is outside the vocabulary"),
    ([[1.5, 2.5]], InvalidPromptError, "a flat list of token ids"),
    ([[[1, 2], [3]]], InvalidPromptError, "a flat list of token ids"),
    ([[True, False]], InvalidPromptError, "a flat list of token ids"),
    ([[2**70]], InvalidPromptError, "outside the vocabulary|a flat list of token ids"),
    ([None], InvalidPromptError, "a prompt is text"),
    (7, InvalidPromptError, "a prompt is text"),
    (b"bytes", InvalidPromptError, "a prompt is text"),
    ([["a", "b"]], InvalidPromptError, "a flat list of token ids"),
    (
        [[1] * 2048],
        PromptTooLongError,
        "maximum context length is 2048 tokens, one of them for output; the prompt has 2048",
    ),
    ([[{"role": "user", "content": "a"}, "b"]], InvalidPromptError, "chat message 1 needs a role"),
]


@pytest.mark.parametrize(("prompts", "error", "message"), BAD_PROMPTS)
def test_a_bad_prompt_is_refused_while_others_run(engine, prompts, error, message):
    good = []
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    thread = threading.Thread(target=lambda: good.extend(engine.generate("go on", params)))
    thread.start()
    with pytest.raises(error, match=message):
        engine.generate(prompts)
    thread.join(timeout=30)
    assert len(good[0].token_ids) == 60


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"priority": "high"}, "priority must be an integer, got 'high'"),
        ({"priority": None}, "priority must be an integer"),
        ({"cache_salt": ["a"]}, "cache_salt must be a string"),
        ({"timeout_s": "1"}, "timeout_s must be a number"),
        ({"timeout_s": float("nan")}, "timeout_s must be a number"),
        ({"timeout_s": -1}, "timeout_s must be a number of seconds above 0"),
        ({"request_ids": "ab"}, "request_ids must be a list"),
        ({"request_ids": [["x"], "y"]}, "request_ids must be a list of non-empty strings"),
        ({"request_ids": ["a"]}, "got 1, expected one for each of 2"),
        ({"request_ids": ["a", "a"]}, "'a' is given twice"),
    ],
)
def test_a_bad_argument_is_refused_before_any_request_starts(engine, arguments, message):
    before = engine.stats()
    with pytest.raises(RequestError, match=message):
        engine.generate(["a", "b"], **arguments)
    assert engine.stats().finished_requests == before.finished_requests


BAD_PARAMS = [
    ({"temperature": -1}, "temperature must be between 0 and 100, got -1"),
    ({"temperature": float("nan")}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": 0}, "top_p must be above 0"),
    ({"top_p": 1.1}, "top_p"),
    ({"top_k": 2**70}, "top_k must be at least 1"),
    ({"min_tokens": 2**70, "max_tokens": None}, "min_tokens"),
    ({"logit_bias": None}, "logit_bias must be a mapping"),
    ({"top_k": 0}, "top_k must be at least 1"),
    ({"min_p": 2}, "min_p"),
    ({"max_tokens": 0}, "max_tokens must be at least 1"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_tokens": 4, "min_tokens": 5}, "min_tokens must be between 0 and max_tokens"),
    ({"n": 0}, "n must be between 1 and"),
    ({"logprobs": 21}, "logprobs must be between 0 and 20"),
    ({"seed": -1}, "seed"),
    ({"stop": [""]}, "stop must be a non-empty string"),
    ({"stop": [3]}, "stop must be a non-empty string"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"logit_bias": {"a": 1}}, "logit_bias"),
    ({"logit_bias": {1: 5000}}, r"logit_bias\[1\]"),
    ({"stop_token_ids": ["x"]}, "stop_token_ids"),
    ({"stop_token_ids": [-1]}, "stop_token_ids must be token ids, got -1"),
    ({"stop_token_ids": [2**31]}, "stop_token_ids must be token ids"),
    ({"stop_token_ids": 5}, "stop_token_ids must be a list of token ids, got int 5"),
    ({"logprob_token_ids": 5}, "logprob_token_ids must be a list of token ids, got int 5"),
    ({"stop": 5}, "stop must be a non-empty string, or a list of them, got int 5"),
    ({"stop": b"x"}, "stop must be a non-empty string, or a list of them, got bytes b'x'"),
    ({"stop_regex": 5}, "stop_regex must be a regular expression, or a list of them, got int 5"),
    ({"choice": 5}, "choice must be a non-empty list of strings, got int 5"),
    ({"ignore_eos": "yes"}, "ignore_eos must be true or false, got 'yes'"),
]


@pytest.mark.parametrize(("fields", "message"), BAD_PARAMS)
def test_a_bad_sampling_parameter_is_refused_by_name(fields, message):
    with pytest.raises(SamplingParamsError, match=message):
        SamplingParams(**fields)


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"logit_bias": {9999: 1.0}}, SamplingParamsError, "logit_bias: token id 9999 is outside"),
        ({"logits_processors": {"nope": {}}}, UnsupportedFeatureError, "Unknown logits processor 'nope'"),
    ],
)
def test_parameters_that_the_model_does_not_support_are_refused(engine, fields, error, message):
    with pytest.raises(error, match=message):
        engine.generate("a", SamplingParams(**fields))


def test_a_request_larger_than_the_memory_is_refused_with_both_sizes():
    with Engine(model="demo", memory={"kv_tokens": 64}) as engine:
        with pytest.raises(NeverFitsError, match="need room for 81 tokens, but the KV memory has room for 64"):
            engine.generate([[5] * 60], SamplingParams(max_tokens=21))
        (whole,) = engine.generate([[5] * 60], SamplingParams(max_tokens=None, ignore_eos=True))
        assert len(whole.token_ids) == 4
        with pytest.raises(NeverFitsError):
            engine.generate([[5] * 64], SamplingParams(max_tokens=None))


def test_an_output_ends_at_the_end_of_the_context(engine):
    (output,) = engine.generate([[5] * 2040], SamplingParams(max_tokens=500, ignore_eos=True))
    assert len(output.token_ids) == 8


def test_a_context_len_above_the_models_is_refused():
    with pytest.raises(ConfigError, match=r"model\.context_len is 40000, but this checkpoint's context has only 2048"):
        Engine(model={"path": "demo", "context_len": 40000})


def test_context_len_limits_requests():
    with Engine(model={"path": "demo", "context_len": 32}) as engine:
        with pytest.raises(PromptTooLongError, match="length is 32"):
            engine.generate([[5] * 32])
        assert len(engine.generate([[5] * 30], SamplingParams(max_tokens=9, ignore_eos=True))[0].token_ids) == 2


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        ({"cach": {}}, ConfigError, "cach: unknown key; did you mean 'cache'"),
        ({"cache": {"page_size": 3}}, ConfigError, "cache.page_size"),
        ({"cache": "radixx"}, UnknownProviderError, "Unknown prefix cache 'radixx'. Available: .*radix"),
        ({"cache": {"eviction": "lfru"}}, UnknownProviderError, "Unknown eviction strategy 'lfru'"),
        ({"scheduling": {"policy": "fast"}}, UnknownProviderError, "Unknown scheduling policy 'fast'"),
        ({"attention": "flash"}, UnknownProviderError, "Unknown attention backend 'flash'"),
        ({"attention": {"options": {"kernl": "torch"}}}, ConfigError, "kernl"),
        ({"model": "no/such/folder"}, CheckpointError, "no/such/folder"),
        ({"model": {"path": "demo", "architecture": "qwem"}}, UnknownProviderError, "qwem"),
        ("no_such_file.yaml", ConfigError, "no_such_file.yaml"),
    ],
)
def test_a_bad_configuration_is_refused(config, error, message):
    with pytest.raises(error, match=message):
        Engine(config)


def broken_checkpoint(tmp_path, damage):
    path = write_tiny_checkpoint(tmp_path / "model", tokenizer=True)
    damage(path)
    return str(path)


def truncate(path):
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def unsupported(path):
    config = json.loads((path / "config.json").read_text())
    config["architectures"] = ["MambaForCausalLM"]
    (path / "config.json").write_text(json.dumps(config))


def wider(path):
    config = json.loads((path / "config.json").read_text())
    config["intermediate_size"] = 128
    (path / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("damage", "error", "message"),
    [
        (truncate, CheckpointError, "model.safetensors"),
        (
            unsupported,
            UnsupportedArchitectureError,
            "No model serves MambaForCausalLM.* only the language model LlamaForCausalLM",
        ),
        (wider, WeightError, "model.layers.0.mlp"),
        (lambda path: (path / "model.safetensors").unlink(), CheckpointError, "safetensors"),
        (lambda path: (path / "config.json").unlink(), CheckpointError, "config.json"),
        (lambda path: (path / "config.json").write_text("{"), CheckpointError, "config.json"),
        (lambda path: (path / "tokenizer.json").unlink(), CheckpointError, "tokenizer.json"),
        (lambda path: shutil.rmtree(path), CheckpointError, "model"),
    ],
)
def test_a_damaged_checkpoint_is_refused(tmp_path, damage, error, message):
    with pytest.raises(error, match=message):
        Engine(model=broken_checkpoint(tmp_path, damage))


def test_a_bad_prompt_in_a_call_prevents_all_its_requests(engine):
    before = engine.stats()
    with pytest.raises(RequestError):
        engine.generate(["fine", [99999]])
    assert engine.stats().prompt_tokens == before.prompt_tokens
