"""Models generate the same tokens after their memory was released and resumed."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from graftlm import SamplingParams
from graftlm.assembly.assemble import assemble
from graftlm.assembly.target import detect_platform
from graftlm.config import EngineConfig
from graftlm.errors import RequestError
from graftlm.registry import Registry
from graftlm.testing.tiny_models import write_random_checkpoint

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
ALL = ("kv_cache", "weights")


class Stepped:
    """An assembled engine that a test runs step by step."""

    def __init__(self, path, **sections):
        model = {"path": str(path), "device": "cpu", "dtype": "float32"} | sections.pop("model", {})
        config = EngineConfig.load({"model": model, "memory": {"kv_tokens": 2048}, "debug": True} | sections)
        platform = detect_platform(config)
        self.parts = assemble(config, Registry.load(config.plugins, (), platform), platform)
        self.loop = self.parts.loop
        self.tokens = {}
        self.cached = {}

    def add(self, request_id, num_tokens=40):
        prompt = np.random.default_rng(num_tokens).integers(1, 300, num_tokens).astype(np.int32)
        intake = self.parts.intake
        self.loop.add([intake.request(request_id, intake.check_prompt(prompt), GREEDY)], lambda: None)
        self.tokens[request_id] = []

    def step(self):
        self.take(self.loop.step())

    def take(self, updates):
        for update in updates:
            self.tokens[update.request_id] += update.token_ids
            if update.usage is not None:
                self.cached[update.request_id] = update.usage.cached_tokens

    def run(self, request_id, num_tokens=40):
        self.add(request_id, num_tokens)
        while self.loop.scheduler.has_work:
            self.step()
        return self.tokens[request_id]

    def release(self, *tags, keep_weights=True):
        self.take(self.loop.settle())
        self.parts.release_memory(tags, keep_weights=keep_weights)
        self.take(self.loop.take_updates())
        assert not self.parts.can_run


@pytest.fixture
def stepped():
    made = []

    def make(*arguments, **sections):
        made.append(Stepped(*arguments, **sections))
        return made[-1]

    yield make
    for engine in made:
        engine.loop.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "name",
    [
        "demo",
        "llama-mha-untied-rope3",
        "gemma2",
        "qwen2",
        "deepseek_v2",
        "gpt_oss",
        "mixtral",
        "qwen3-moe",
        "phi3",
        "lfm2",
    ],
)
def test_every_kind_of_model_is_restored(checkpoint, stepped, name, dtype):
    engine = stepped(checkpoint(name), model={"dtype": dtype})
    expected = engine.run("before")
    engine.release(*ALL)
    engine.parts.resume_memory(ALL)
    assert engine.parts.can_run
    assert engine.run("after") == expected
    assert engine.cached["after"] == 0


def test_a_module_of_transformers_is_restored(stepped, tmp_path):
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    write_random_checkpoint(
        tmp_path, "gpt_neox", sizes | {"vocab_size": 512, "max_position_embeddings": 512}, tokenizer=True
    )
    engine = stepped(tmp_path)
    assert engine.parts.resolved["model"]["name"] == "transformers"
    expected = engine.run("before")
    engine.release(*ALL)
    engine.parts.resume_memory(ALL)
    assert engine.run("after") == expected


@pytest.mark.parametrize("name", ["demo", "gemma2", "gpt_oss", "mixtral"])
def test_weights_that_were_sent_as_tensors_are_restored(checkpoint, stepped, name):
    engine = stepped(checkpoint(name), model={"dtype": "bfloat16"})
    tensors = {}
    for file in sorted(checkpoint(name).glob("*.safetensors")):
        tensors |= load_file(file)
    scaled = {key: tensor * (-1 if "layers.1" in key else 1) for key, tensor in tensors.items()}
    engine.parts.replace_weights(engine.parts.weights.checked(scaled), flush_cache=True)
    expected = engine.run("sent")
    sent = {key: engine.parts.read_weight(key) for key in tensors}
    assert any(not torch.equal(sent[key], tensors[key].bfloat16()) for key in tensors)
    for order in (ALL, ALL[::-1]):
        for tag in order:
            engine.release(tag)
        for tag in order:
            assert not engine.parts.can_run
            engine.parts.resume_memory([tag])
        assert engine.run(f"after {order}") == expected
        assert all(torch.equal(engine.parts.read_weight(key), sent[key]) for key in tensors)


@pytest.mark.parametrize("cache", ["radix", "chunk", "hicache"])
@pytest.mark.parametrize("overlap", [True, False])
def test_running_requests_continue_after_the_memory_was_released(stepped, cache, overlap, tmp_path):
    options = {"options": {"host_tokens": 512}} if cache == "hicache" else {}
    engine = stepped(
        "demo", cache={"name": cache} | options, scheduling={"overlap": overlap, "prefill_tokens_per_step": 64}
    )
    expected = [engine.run("short", 40), engine.run("long", 300)]
    engine.loop.flush_cache()
    engine.add("short again", 40)
    engine.add("long again", 300)
    while not engine.tokens["short again"]:
        engine.step()
    assert not engine.tokens["long again"]  # its prompt is computed in chunks
    engine.release(*ALL)
    engine.parts.resume_memory(ALL)
    while engine.loop.scheduler.has_work:
        engine.step()
    assert [engine.tokens["short again"], engine.tokens["long again"]] == expected
    engine.loop.scheduler.kv.check()


def test_releases_and_resumptions_may_be_repeated(stepped):
    engine = stepped("demo")
    expected = engine.run("before")
    engine.parts.resume_memory(ALL)
    for _ in range(2):
        engine.release(*ALL)
    engine.parts.resume_memory(["kv_cache"])
    engine.parts.resume_memory(["kv_cache"])
    assert not engine.parts.can_run
    engine.parts.resume_memory(["weights"])
    assert engine.run("after") == expected


def test_dropped_weights_are_missing_until_a_whole_model_was_loaded(checkpoint, stepped):
    engine, weights = stepped("demo"), load_file(checkpoint("demo") / "model.safetensors")
    expected = engine.run("before")
    engine.release("weights")
    engine.release("weights", keep_weights=False)
    with pytest.raises(RequestError, match="resume it first"):
        engine.parts.replace_weights(engine.parts.weights.checked(weights), flush_cache=True)
    engine.parts.resume_memory(ALL)
    for name in weights:
        assert not engine.parts.can_run
        with pytest.raises(RequestError, match="weights were dropped"):
            engine.parts.read_weight(name)
        engine.parts.replace_weights(engine.parts.weights.checked({name: weights[name]}), flush_cache=True)
    assert engine.parts.can_run
    assert engine.run("after") == expected


def test_one_bad_tensor_after_a_drop_changes_nothing(stepped):
    engine = stepped("demo")
    engine.release("weights", keep_weights=False)
    engine.parts.resume_memory(ALL)
    with pytest.raises(Exception, match="nonsense"):
        engine.parts.weights.checked({"nonsense": torch.ones(3)})
    assert engine.parts.weights.lacking == "the weights were dropped; load new ones for the whole model"
