"""Properties that only a CUDA device shows: graphs repeat what they captured, and steps wait for the device only where
intended.
"""

import logging
import re

import numpy as np
import pytest
import torch

from graftlm import EngineConfig, SamplingParams
from graftlm.assembly.assemble import assemble
from graftlm.assembly.target import detect_platform
from graftlm.registry import Registry
from graftlm.testing.hugging_face import HuggingFaceModel

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

MAX_TOKENS = 16
GREEDY = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
#: Sampling parameters that together use every stage of the sampler.
PARAMS = [
    GREEDY,
    SamplingParams(temperature=0.7, top_k=20, max_tokens=MAX_TOKENS),
    SamplingParams(temperature=1.0, top_p=0.9, min_p=0.01, seed=3, max_tokens=MAX_TOKENS),
    SamplingParams(temperature=0, repetition_penalty=1.2, frequency_penalty=0.5, max_tokens=MAX_TOKENS),
    SamplingParams(temperature=0, logit_bias={5: 2.0}, min_tokens=4, logprobs=3, max_tokens=MAX_TOKENS),
]


def assembled(path, dtype="float32", **config):
    settings = EngineConfig.load(
        {"model": {"path": str(path), "dtype": dtype, "device": "cuda"}, "memory": {"kv_tokens": 4096}}, **config
    )
    platform = detect_platform(settings)
    return assemble(settings, Registry.load(settings.plugins, (), platform), platform)


def prompts_of(num):
    rng = np.random.default_rng(2)
    return [rng.integers(1, 300, int(n)).tolist() for n in rng.integers(1, 90, num)]


def add(parts, prompts, params):
    for i, prompt in enumerate(prompts):
        request = parts.intake.request(str(i), parts.intake.check_prompt(prompt), params[i % len(params)])
        parts.loop.scheduler.add(request)


def drain(parts, num):
    tokens = {str(i): [] for i in range(num)}
    while parts.loop.scheduler.has_work:
        for update in parts.loop.step():
            tokens[update.request_id] += update.token_ids
    parts.loop.close()
    return list(tokens.values())


@pytest.mark.parametrize("name", ["triton", "torch_native"])
def test_released_memory_is_free_and_the_tokens_are_the_same_afterwards(checkpoint, name):
    parts = assembled(checkpoint("llama"), attention={"name": name})
    allocated = torch.cuda.memory_allocated()
    prompts = prompts_of(4)

    def run():
        tokens = {str(i): [] for i in range(len(prompts))}
        add(parts, prompts, PARAMS)
        while parts.loop.scheduler.has_work:
            for update in parts.loop.step():
                tokens[update.request_id] += update.token_ids
        return tokens

    expected = run()
    parts.loop.settle()
    weight_bytes = sum(weight.nbytes for weight in parts.device_parts.model.parameters())
    parts.release_memory(("kv_cache", "weights"), keep_weights=True)
    released = allocated - torch.cuda.memory_allocated()
    assert released > 0.9 * (weight_bytes + parts.device_parts.kv.num_bytes)
    parts.resume_memory(("weights", "kv_cache"))
    assert run() == expected
    parts.loop.close()


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(
    ("name", "graphs", "page_size"),
    [("triton", True, 1), ("triton", True, 16), ("triton", False, 16), ("torch_native", False, 1)],
)
def test_greedy_tokens_equal_transformers(checkpoint, name, graphs, page_size, overlap):
    prompts = prompts_of(12)
    parts = assembled(
        checkpoint("llama"),
        attention=name,
        cache={"page_size": page_size},
        scheduling={"overlap": overlap, "max_running_requests": 12},
        execution={"graphs": graphs},
    )
    add(parts, prompts, [GREEDY])
    found = drain(parts, len(prompts))
    oracle = HuggingFaceModel(checkpoint("llama"))
    assert found == [oracle.generate(prompt, MAX_TOKENS) for prompt in prompts]
    replays = parts.device_parts.graphs.num_replays if graphs else 0
    assert (replays > 0) == graphs


@pytest.mark.parametrize(("name", "graphs"), [("triton", False), ("triton", True), ("torch_native", False)])
def test_launching_a_step_never_waits_for_the_device(checkpoint, name, graphs):
    parts = assembled(
        checkpoint("llama"), "bfloat16", attention=name, execution={"graphs": graphs}, scheduling={"overlap": False}
    )
    scheduler, runner = parts.loop.scheduler, parts.device_parts.runner
    prompts = prompts_of(10)
    for mode in ("default", "error"):  # the first steps compile kernels and make tables
        add(parts, prompts, PARAMS)
        while (plan := scheduler.plan()) is not None:
            torch.cuda.set_sync_debug_mode(mode)
            try:
                launched = runner.launch(plan)
            finally:
                torch.cuda.set_sync_debug_mode("default")
            scheduler.commit(plan, launched.result())
    parts.loop.close()


def test_graphs_take_no_more_memory_than_was_reserved(checkpoint, caplog):
    settings = EngineConfig.load({"model": {"path": str(checkpoint("llama")), "device": "cuda"}, "attention": "triton"})
    platform = detect_platform(settings)
    with caplog.at_level(logging.INFO):
        parts = assemble(settings, Registry.load(settings.plugins, (), platform), platform)
    parts.loop.close()
    kept = float(re.search(r"([\d.]+) GiB for graphs", caplog.text)[1])
    taken = float(re.search(r"graphs are captured and use ([\d.]+) GiB", caplog.text)[1])
    assert 0 <= taken <= kept
