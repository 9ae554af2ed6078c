"""Steps that are padded as for graphs give Hugging Face's greedy tokens in float32, for any order of arrival."""

import numpy as np
import pytest

from graftlm import EngineConfig, SamplingParams
from graftlm.assembly.assemble import assemble
from graftlm.contracts import Platform
from graftlm.errors import ConfigError
from graftlm.execution.graphs import DecodeGraphs
from graftlm.registry import Registry
from graftlm.testing.hugging_face import HuggingFaceModel

MAX_TOKENS = 12
GREEDY = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)

#: model, cache, page size, overlap, kernel, captured sizes, prefill tokens per step
CASES = [
    ("llama", "radix", 1, True, "torch", None, 64),
    ("llama", "radix", 16, False, "torch", None, 7),
    ("llama", "chunk", 16, True, "native", (3, 5), 2048),
    ("gemma2", "swa_radix", 4, True, "torch", (6, 12), 64),
]


@pytest.fixture(scope="module")
def workload(checkpoint):
    """Return a function from a model's name to prompts and Hugging Face's answers."""
    answers = {}

    def get(name):
        if name not in answers:
            rng = np.random.default_rng(11)
            shared = rng.integers(1, 300, 24).tolist()
            prompts = [shared[: int(rng.integers(25))] + [int(t) for t in rng.integers(1, 300, n)] for n in LENS]
            oracle = HuggingFaceModel(checkpoint(name))
            answers[name] = prompts, [oracle.generate(prompt, MAX_TOKENS) for prompt in prompts]
        return answers[name]

    return get


LENS = [1, 40, 3, 17, 60, 9, 1, 33, 5, 21, 2, 48]


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
                parts.loop.scheduler.add(parts.intake.request(name, prompt, GREEDY))
        for update in parts.loop.step():
            tokens[update.request_id] += update.token_ids
    return list(tokens.values())


@pytest.mark.parametrize(("model", "cache", "page_size", "overlap", "kernel", "sizes", "chunk"), CASES)
def test_greedy_tokens_equal_transformers(checkpoint, workload, model, cache, page_size, overlap, kernel, sizes, chunk):
    prompts, answers = workload(model)
    parts = assembled(
        checkpoint(model),
        attention={"name": "torch_native", "options": {"kernel": kernel}},
        cache={"name": cache, "page_size": page_size},
        scheduling={"prefill_tokens_per_step": chunk, "overlap": overlap, "max_running_requests": 12},
        execution={"graphs": True, "graph_batch_sizes": sizes},
        memory={"kv_tokens": 1024},
        debug=True,
    )
    found = generate(parts, prompts, np.random.default_rng(page_size))
    parts.loop.close()
    assert found == answers
    graphs, steps = parts.device_parts.graphs, parts.loop.scheduler.counters.steps
    assert 0 < graphs.num_replays < steps


@pytest.mark.parametrize("graphs", ["auto", False])
def test_a_cpu_pads_steps_only_if_configured(checkpoint, graphs):
    parts = assembled(checkpoint("llama"), execution={"graphs": graphs}, memory={"kv_tokens": 64})
    parts.loop.close()
    assert not isinstance(parts.device_parts.graphs, DecodeGraphs)
    assert len(parts.device_parts.kv.keys(0)) == 64


@pytest.mark.parametrize(
    ("sizes", "problem"),
    [
        (
            (2, 9),
            "execution.graph_batch_sizes: must be at most scheduling.max_running_requests 8, got 9",
        ),
        ((), "execution.graph_batch_sizes: must have at least one element, or be null, got ()"),
        ((4, 0), "execution.graph_batch_sizes[1]: must be at least 1, got 0"),
    ],
)
def test_impossible_graph_sizes_are_refused(sizes, problem):
    with pytest.raises(ConfigError) as caught:
        EngineConfig(scheduling={"max_running_requests": 8}, execution={"graph_batch_sizes": sizes})
    assert str(caught.value) == problem
