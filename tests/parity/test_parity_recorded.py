"""Recorded steps give Hugging Face's greedy tokens in float32, for any order of arrival."""

import subprocess
import sys

import numpy as np
import pytest
import torch

from graftlm import Engine, EngineConfig, SamplingParams
from graftlm.assembly.assemble import assemble
from graftlm.contracts import Platform
from graftlm.registry import Registry
from graftlm.testing.hugging_face import HuggingFaceModel
from graftlm.testing.tiny_models import write_tiny_checkpoint

MAX_TOKENS = 12
LENS = [1, 40, 3, 17, 60, 9, 1, 33, 5, 21, 2, 48]

#: model, cache, page size, overlap, prefill tokens per step
CASES = [
    ("llama", "radix", 1, True, 64),
    ("llama", "radix", 16, False, 7),
    ("gemma2", "swa_radix", 4, True, 64),
    ("phi3", "radix", 16, True, 2048),
    pytest.param("lfm2", "radix", 16, True, 64, marks=pytest.mark.full),
    pytest.param("mamba2", "radix", 1, True, 7, marks=pytest.mark.full),
    ("qwen3_5", "radix", 4, False, 64),
]


def assembled(path, **config):
    settings = EngineConfig.load({"model": {"path": str(path), "dtype": "float32", "device": "cpu"}}, **config)
    return assemble(settings, Registry.load(settings.plugins), Platform("cpu"))


def generate(parts, prompts, rng):
    """Add prompts between steps at random, and return the tokens of each."""
    tokens = {str(i): [] for i in range(len(prompts))}
    waiting = list(tokens)
    while waiting or parts.loop.scheduler.has_work:
        for _ in range(rng.choice([0, 0, 1, 3])):
            if waiting:
                name = waiting.pop(0)
                prompt = parts.intake.check_prompt(prompts[int(name)])
                params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
                parts.loop.scheduler.add(parts.intake.request(name, prompt, params))
        for update in parts.loop.step():
            tokens[update.request_id] += update.token_ids
    return list(tokens.values())


@pytest.mark.parametrize(("model", "cache", "page_size", "overlap", "chunk"), CASES)
def test_greedy_tokens_equal_transformers(checkpoint, model, cache, page_size, overlap, chunk):
    rng = np.random.default_rng(11)
    shared = rng.integers(1, 300, 24).tolist()
    prompts = [shared[: int(rng.integers(25))] + [int(t) for t in rng.integers(1, 300, n)] for n in LENS]
    oracle = HuggingFaceModel(checkpoint(model))
    parts = assembled(
        checkpoint(model),
        cache={"name": cache, "page_size": page_size},
        scheduling={"prefill_tokens_per_step": chunk, "overlap": overlap, "max_running_requests": 12},
        memory={"kv_tokens": 1024},
        debug=True,
    )
    found = generate(parts, prompts, np.random.default_rng(page_size))
    parts.loop.close()
    assert found == [oracle.generate(prompt, MAX_TOKENS) for prompt in prompts]
    assert parts.device_parts.graphs.num_replays > 0


@pytest.mark.parametrize(
    "config",
    [
        {"execution": {"graphs": False}},
        {"model": {"architecture": "transformers"}},
        {"attention": {"name": "torch_native", "options": {"kernel": "torch"}}},
    ],
    ids=["told not to", "a model that may do anything", "attention in PyTorch"],
)
def test_configurations_whose_calls_cannot_be_repeated_are_not_recorded(checkpoint, config):
    parts = assembled(checkpoint("llama"), memory={"kv_tokens": 64}, **config)
    parts.loop.close()
    assert parts.device_parts.graphs is None


@pytest.mark.parametrize("config", [{"model": {"quantization": {"name": "int8"}}}, {"memory": {"kv_dtype": "int8"}}])
def test_recorded_steps_in_bfloat16_give_the_same_tokens(checkpoint, config):
    prompts, params = [[5, 6, 7], [9] * 20, [3]], SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
    answers = []
    for graphs in ("auto", False):
        settings = {"memory": {"kv_tokens": 256} | config.get("memory", {}), "execution": {"graphs": graphs}}
        model = {"path": str(checkpoint("llama")), "dtype": "bfloat16", "device": "cpu"} | config.get("model", {})
        with Engine(EngineConfig.load({"model": model}, **settings)) as engine:
            answers.append([output.token_ids for output in engine.generate(prompts, params)])
    assert answers[0] == answers[1]


def test_recording_does_not_import_pytorchs_compiler(checkpoint):
    """The import would take seconds during the first answer."""
    program = (
        "import sys\nfrom graftlm import Engine, SamplingParams\n"
        f"with Engine(model={str(checkpoint('llama'))!r}, memory={{'kv_tokens': 256}}) as engine:\n"
        "    engine.generate([[5, 6, 7]], SamplingParams(temperature=0, max_tokens=8))\n"
        "assert 'torch._dynamo' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def overwritten():
    """Overwrite memory that has been freed."""
    return [torch.full((size,), 7.0, dtype=torch.bfloat16) for size in range(16, 70_000, 64)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_recorded_steps_use_the_current_weights(tmp_path, dtype):
    """Packed weights have other addresses after they were read or replaced."""
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
    first, second = (write_tiny_checkpoint(tmp_path / str(seed), tokenizer=True, seed=seed) for seed in (1, 2))
    # without cached prefixes, all steps round equally
    settings = {"memory": {"kv_tokens": 256}, "cache": {"name": "chunk"}}

    def start(path, **more):
        return Engine(model={"path": str(path), "dtype": dtype, "device": "cpu"}, **settings, **more)

    answers = []
    for path in (first, second):
        with start(path, execution={"graphs": False}) as engine:
            answers.append(engine.generate([[5, 6, 7]], params)[0].token_ids)
    assert answers[0] != answers[1]
    with start(first) as engine:
        assert engine.generate([[5, 6, 7]], params)[0].token_ids == answers[0]
        engine.get_weight("model.layers.0.self_attn.q_proj.weight")
        kept = overwritten()
        assert engine.generate([[5, 6, 7]], params)[0].token_ids == answers[0]
        engine.update_weights(second)
        kept += overwritten()
        assert engine.generate([[5, 6, 7]], params)[0].token_ids == answers[1]
