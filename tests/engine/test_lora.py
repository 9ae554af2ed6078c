"""Adapters in an engine: requests get the tokens of merged weights, prefixes are separate, and adapters load at run
time.
"""

import json
import re
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest

from graftlm import Engine, SamplingParams, function, gen
from graftlm.assembly.assemble import assemble
from graftlm.assembly.target import detect_platform
from graftlm.config import EngineConfig
from graftlm.errors import AdapterError, AdapterNotFoundError, ConfigError, RequestError
from graftlm.lang.backends.engine import EngineBackend
from graftlm.registry import Registry
from graftlm.request_options import RequestOptions
from graftlm.testing.tiny_models import write_tiny_checkpoint

PAGE = (Path(__file__).parents[2] / "docs" / "lora.md").read_text(encoding="utf-8")
MAX_TOKENS = 10
GREEDY = SamplingParams(max_tokens=MAX_TOKENS, temperature=0)
NAMES = ("attention", None, "all", "patterns", "second-layer")


def prompts_of(seed, sizes):
    rng = np.random.default_rng(seed)
    return [rng.integers(1, 300, size).tolist() for size in sizes]


def sections_of(adapters, names, **sections):
    """Return a configuration with some of the adapters."""
    lora = {"adapters": {name: str(adapters.folders[name]) for name in names if name}, "max_rank": 8, "max_loaded": 4}
    sections["lora"] = lora | sections.get("lora", {})
    return {"model": str(adapters.base), "memory": {"kv_tokens": 1024}, "debug": True} | sections


def make_engine(adapters, names=NAMES, **sections):
    return Engine(sections_of(adapters, names, **sections))


@pytest.fixture
def engine(adapters):
    """An engine with memory for two adapters, one of which is loaded."""
    with make_engine(adapters, names=["attention"], lora={"max_loaded": 2}) as it:
        yield it


def test_adapters_of_the_configuration_are_logged_once(adapters, caplog):
    with caplog.at_level("INFO"), make_engine(adapters, names=["attention"]):
        told = [record.message for record in caplog.records if "is loaded" in record.message]
    assert told == [f"adapter attention of {adapters.folders['attention']} is loaded"]


def tokens(outputs):
    assert [output.error for output in outputs] == [None] * len(outputs)
    return [list(output.token_ids) for output in outputs]


CASES = {
    "overlap": {},
    "one step at a time": {"scheduling": {"overlap": False}},
    "chunks": {"scheduling": {"prefill_tokens_per_step": 7}},
    "pages of 16, chunks, one step at a time": {
        "cache": {"page_size": 16},
        "scheduling": {"prefill_tokens_per_step": 24, "overlap": False},
    },
    "retraction": {"memory": {"kv_tokens": 160}},
    "padded as for graphs": {"execution": {"graphs": True}},
}


@pytest.mark.parametrize("sections", CASES.values(), ids=CASES)
def test_one_batch_with_four_adapters_and_none_generates_the_tokens_of_merged_weights(adapters, sections):
    prompts = prompts_of(1, [3, 17, 1, 40, 9] * 3)
    names = list(NAMES) * 2 + [None, *NAMES[:4]]
    with make_engine(adapters, **sections) as engine:
        outputs = engine.generate(prompts, GREEDY, adapter=names)
        if sections == CASES["retraction"]:
            assert engine.stats().retractions
    expected = [adapters.expected(name, prompt, MAX_TOKENS) for name, prompt in zip(names, prompts, strict=True)]
    assert tokens(outputs) == expected


def test_steps_without_adapters_generate_the_base_models_tokens(adapters):
    prompt = prompts_of(2, [12])[0]
    with make_engine(adapters) as engine:
        for name in ("all", None, "all", None):
            assert tokens(engine.generate([prompt], GREEDY, adapter=name)) == [
                adapters.expected(name, prompt, MAX_TOKENS)
            ]


def test_embeddings_use_their_adapter(adapters):
    prompt = prompts_of(3, [12])[0]
    with make_engine(adapters) as engine:
        vectors = [engine.embed([prompt], adapter=name)[0].embedding for name in (None, "all", "all", "attention")]
    assert np.allclose(vectors[1], vectors[2], atol=1e-5)
    assert all(abs(vectors[i] @ vectors[1]) < 0.99 for i in (0, 3))


def test_streams_and_programs_use_their_adapter(engine, adapters):
    prompt = prompts_of(10, [9])[0]
    *_, last = engine.stream(prompt, GREEDY, adapter="attention")
    assert list(last.token_ids) == adapters.expected("attention", prompt, MAX_TOKENS)

    @function
    def answer(s):
        s += "the river" + gen("text", max_tokens=MAX_TOKENS, temperature=0)

    (expected,) = engine.generate(["the river"], GREEDY, adapter="attention")
    assert answer.run(backend=EngineBackend(engine, adapter="attention"))["text"] == expected.text


def test_prefixes_are_shared_only_within_an_adapter_and_a_salt(engine, adapters):
    engine.load_adapter("other", adapters.folders["all"])
    prompt = prompts_of(4, [30])[0]
    keys = [(name, salt) for name in (None, "attention", "other") for salt in ("", "tenant")]

    def cached():
        outputs = [engine.generate([prompt], GREEDY, adapter=name, cache_salt=salt)[0] for name, salt in keys]
        return [output.usage.cached_tokens for output in outputs]

    assert cached() == [0] * 6
    assert cached() == [29] * 6


def test_a_pin_applies_to_the_adapters_prefix(engine):
    prompt = prompts_of(5, [30])[0]
    engine.generate([prompt], GREEDY, adapter="attention")
    assert engine.pin_prefix(prompt, 60.0) == 0
    assert engine.pin_prefix(prompt, 60.0, adapter="attention") == 30
    assert engine.unpin_prefix(prompt, adapter="attention")


def test_new_content_under_an_old_name_does_not_reuse_old_prefixes(engine, adapters):
    prompt = prompts_of(6, [30])[0]
    for folder, cached in (("attention", 0), ("all", 0), ("attention", 29), ("all", 29)):
        engine.unload_adapter("attention")
        engine.load_adapter("attention", adapters.folders[folder])
        (output,) = engine.generate([prompt], GREEDY, adapter="attention")
        assert list(output.token_ids) == adapters.expected(folder, prompt, MAX_TOKENS)
        assert output.usage.cached_tokens == cached


class Stepped:
    """An assembled engine that a test runs step by step."""

    def __init__(self, adapters, names, **sections):
        config = EngineConfig.load(sections_of(adapters, names, **sections))
        platform = detect_platform(config)
        self.parts = assemble(config, Registry.load(config.plugins, (), platform), platform)
        self.tokens = {}

    def add(self, request_id, prompt, params, adapter):
        intake = self.parts.intake
        request = intake.request(request_id, intake.check_prompt(prompt), params, RequestOptions(adapter=adapter))
        self.parts.loop.add([request], lambda: None)
        self.tokens[request_id] = []

    def step(self):
        for update in self.parts.loop.step():
            self.tokens[update.request_id] += update.token_ids

    def load(self, name, folder):
        self.parts.adapters.install(name, str(folder), self.parts.adapters.read(name, str(folder)))


@pytest.mark.parametrize("overlap", [True, False])
def test_requests_end_with_the_adapter_they_started_with(adapters, overlap):
    prompt = prompts_of(7, [20])[0]
    engine = Stepped(adapters, ["attention"], lora={"max_loaded": 2}, scheduling={"overlap": overlap})
    engine.add("old", prompt, GREEDY, "attention")
    while not engine.tokens["old"]:
        engine.step()
    assert engine.parts.adapters.unload("attention") == 1
    engine.load("attention", adapters.folders["all"])
    with pytest.raises(AdapterError, match="all 2 adapter slots are used"):
        engine.load("more", adapters.folders["patterns"])
    engine.add("new", prompt, GREEDY, "attention")
    assert len(engine.tokens["old"]) < MAX_TOKENS
    while engine.parts.loop.scheduler.has_work:
        engine.step()
    engine.load("more", adapters.folders["patterns"])  # the slot is free again
    assert sorted(engine.parts.adapters.loaded) == ["attention", "more"]
    expected = {
        request_id: adapters.expected(name, prompt, MAX_TOKENS)
        for request_id, name in (("old", "attention"), ("new", "all"))
    }
    assert engine.tokens == expected
    engine.parts.loop.close()


def test_loading_and_unloading_do_not_affect_other_requests(engine, adapters):
    prompts = prompts_of(8, [5, 30, 12, 50] * 4)
    names = [None, "attention"] * 8
    found = []
    thread = threading.Thread(target=lambda: found.append(engine.generate(prompts, GREEDY, adapter=names)))
    thread.start()
    for folder in ("all", "patterns", "second-layer") * 2:
        engine.load_adapter("other", adapters.folders[folder])
        expected = adapters.expected(folder, prompts[0], MAX_TOKENS)
        assert tokens(engine.generate([prompts[0]], GREEDY, adapter="other")) == [expected]
        engine.unload_adapter("other")
    thread.join(60)
    expected = [adapters.expected(name, prompt, MAX_TOKENS) for name, prompt in zip(names, prompts, strict=True)]
    assert tokens(found[0]) == expected


def test_a_request_whose_adapter_was_unloaded_before_queueing_is_refused(engine):
    intake, loop = engine._parts.intake, engine._parts.loop
    request = intake.request("late", intake.check_prompt([1, 2]), GREEDY, RequestOptions(adapter="attention"))
    engine.unload_adapter("attention")
    with pytest.raises(AdapterNotFoundError, match="'attention' has been unloaded"):
        loop.scheduler.add(request)


@pytest.mark.parametrize(
    ("adapter", "kind", "message"),
    [
        ("x", AdapterNotFoundError, r"no adapter 'x' is loaded\. Loaded: attention\."),
        (["attention"], RequestError, r"adapter: got 1 names, expected one for each of 2 prompt\(s\)"),
        (7, RequestError, "adapter must be an adapter's name, None, or a list of these, got 7"),
        (["attention", 7], RequestError, "adapter must be"),
    ],
)
def test_wrong_adapters_of_a_call_are_refused(engine, adapter, kind, message):
    with pytest.raises(kind, match=message):
        engine.generate([[1], [2]], GREEDY, adapter=adapter)


def test_an_unsuitable_adapter_changes_nothing(engine, adapters, tmp_path):
    folder = tmp_path / "dora"
    shutil.copytree(adapters.folders["all"], folder)
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"use_dora": True}))
    for name, path, message in (
        ("attention", adapters.folders["all"], "'attention' is already loaded"),
        ("a:b", adapters.folders["all"], "an adapter's name"),
        ("new", folder, "it is a DoRA adapter"),
        ("new", tmp_path / "nothing", "No adapter at"),
    ):
        with pytest.raises(AdapterError, match=message):
            engine.load_adapter(name, path)
    assert list(engine.adapters) == ["attention"]


def test_the_error_without_adapters_says_how_to_enable_them(checkpoint):
    with Engine(model=str(checkpoint("llama")), memory={"kv_tokens": 256}) as engine:
        assert engine.adapters == {}
        with pytest.raises(AdapterError, match=r"Set lora\.enabled: true"):
            engine.load_adapter("a", "/a")
        with pytest.raises(AdapterNotFoundError, match=r"does not support adapters\. Set lora\.adapters"):
            engine.generate([[1]], GREEDY, adapter="a")


def test_projections_outside_target_modules_are_refused(adapters):
    with pytest.raises(AdapterError, match=r"which this engine does not support.*: q_proj, v_proj"):
        make_engine(adapters, ["all"], lora={"target_modules": ["q_proj", "v_proj"]})
    with pytest.raises(ConfigError, match=r"names lm_head, which .*Available: down_proj, gate_proj"):
        make_engine(adapters, [], lora={"target_modules": ["lm_head"], "enabled": True})
    with make_engine(adapters, ["attention"], lora={"target_modules": ["q_proj", "v_proj"]}) as engine:
        assert tokens(engine.generate([[5, 6, 7]], GREEDY, adapter="attention")) == [
            adapters.expected("attention", [5, 6, 7], MAX_TOKENS)
        ]


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        ({"adapters": {"a": "/a", "b": "/b"}, "max_loaded": 1}, "`adapters` has 2 adapters, more than `max_loaded` 1"),
        ({"adapters": {"a": "/a"}, "enabled": False}, "`enabled` is false"),
        ({"target_modules": []}, "must have at least one element"),
    ],
)
def test_a_contradictory_lora_section_is_refused(lora, message):
    with pytest.raises(ConfigError, match=message):
        Engine(lora=lora)


@pytest.mark.parametrize("model", ["qwen2", "gemma3"])
def test_other_model_families_support_adapters(checkpoint, tmp_path, model):
    from graftlm.testing.hugging_face import HuggingFaceModel
    from graftlm.testing.tiny_adapters import write_tiny_adapter

    merged = write_tiny_adapter(tmp_path / "a", checkpoint(model), r=4, lora_alpha=4, target_modules="all-linear")
    prompts = prompts_of(9, [7, 25])
    oracle = HuggingFaceModel(merged)
    with Engine(model=str(checkpoint(model)), lora={"adapters": {"a": str(tmp_path / "a")}, "max_rank": 4}) as engine:
        outputs = engine.generate(prompts, GREEDY, adapter="a")
    assert tokens(outputs) == [oracle.generate(prompt, MAX_TOKENS) for prompt in prompts]


def test_the_examples_of_the_docs_page_run(adapters, tmp_path):
    (yaml,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    code = next(code for code in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if "Engine(" in code)
    folders = {"/adapters/sql": adapters.folders["attention"], "/adapters/chat": adapters.folders["all"]}
    for there, here in ({"/models/Qwen3-8B": adapters.base} | folders).items():
        yaml = yaml.replace(there, str(here))
    file = tmp_path / "engine.yaml"
    file.write_text(yaml)
    exec(compile(code.replace("engine.yaml", str(file)), "lora.md", "exec"), {})


def test_scores_and_classes_use_the_adapter(engine, adapters, tmp_path):
    labels, query, items = [11, 300], [5, 6, 7], [[8], [9, 10]]
    alone, both, mixed = (
        engine.score(query, items, label_token_ids=labels, adapter=adapter)
        for adapter in (None, "attention", [None, "attention"])
    )
    np.testing.assert_allclose(mixed, [alone[0], both[1]], rtol=1e-3)
    assert not np.allclose(alone, both, rtol=1e-2)
    classifier = write_tiny_checkpoint(tmp_path / "classifier", "llama", num_labels=2, tokenizer=True)
    sections = sections_of(adapters, ["attention"], model=str(classifier))
    with Engine(sections) as judge:
        one, other = judge.classify([query, query], adapter=[None, "attention"])
        np.testing.assert_allclose(one.scores, judge.classify([query])[0].scores, rtol=1e-3)
        assert not np.allclose(one.scores, other.scores, rtol=1e-2)
