"""`graftlm plugins why` explains which provider of a family a configuration gets, and why not the others."""

import json
import sys

import pytest

from graftlm import EngineConfig, Provider, hookimpl
from graftlm.cli import main
from graftlm.cli.plugin_choice import explain_choice
from graftlm.contracts import AttentionCapabilities, EvictionStrategy, Platform
from graftlm.errors import UnsupportedArchitectureError
from graftlm.registry import FAMILIES, Registry


class Strange:
    """Offers an attention backend for pages of 4 tokens, and a strategy that cannot run on any platform."""

    @hookimpl
    def provide_attention_backends(self):
        capabilities = AttentionCapabilities(page_sizes=(4,))
        return [provider("strange", rank=99, capabilities=capabilities), provider("early", capabilities=capabilities)]

    @hookimpl
    def provide_eviction_strategies(self):
        return [provider("nowhere", rank=99, unavailable=lambda platform: f"no luck on {platform.device}")]


def provider(name, **fields):
    return Provider(name=name, summary="x", api_version=1, create=lambda o, c: EvictionStrategy, **fields)


def verdicts(family, **config):
    registry = Registry.load(plugins=[Strange()], platform=Platform("cpu"))
    choice = explain_choice(EngineConfig.model_validate(config), registry, family)
    return choice, {candidate.name: verdict for candidate, verdict in choice.verdicts()}


@pytest.mark.parametrize(
    ("family", "config", "chosen", "reason", "other", "verdict"),
    [
        (
            "attention",
            {},
            "torch_native",
            "highest rank",
            "strange",
            "it supports page sizes 4, but cache.page_size is 1",
        ),
        ("attention", {"cache": {"page_size": 4}}, "strange", "highest rank", "torch_native", "strange has a higher"),
        ("attention", {"cache": {"page_size": 4}}, "strange", "highest rank", "early", "strange has a higher rank"),
        ("eviction", {}, "lru", "cache.eviction.name names it", "nowhere", "no luck on cpu"),
        ("eviction", {"cache": {"eviction": "auto"}}, "lru", "is auto", "fifo", "lru has a higher rank"),
        (
            "eviction",
            {"cache": {"eviction": "fifo"}},
            "fifo",
            "names it",
            "lru",
            "available, but not named in the configuration",
        ),
        ("model", {}, "llama", "is auto", "qwen", "does not support LlamaForCausalLM"),
        ("quantization", {}, None, "model.quantization.name is null", "int8", "not named in the configuration"),
        ("tool_calls", {}, "hermes", "no format fits the chat template", "mistral", "has none of its markers"),
        ("reasoning", {}, None, "no plugin fits", "think", "has none of its markers"),
        ("storage", {}, None, "storage.name is not set", "file", "not named in the configuration"),
        ("logits_processor", {}, None, "request names", None, None),
    ],
)
def test_the_chosen_provider_and_the_others_are_explained(family, config, chosen, reason, other, verdict):
    choice, others = verdicts(family, **config)
    assert choice.name == chosen
    assert reason in choice.reason
    if other is not None:
        assert verdict in others[other]


def write_config(folder, model_type, architecture, **entries):
    """Write a checkpoint's config.json, the only file that is read."""
    sizes = {"vocab_size": 320, "max_position_embeddings": 64, "hidden_size": 32, "num_hidden_layers": 2}
    named = {"model_type": model_type, "architectures": [architecture], "num_attention_heads": 4}
    (folder / "config.json").write_text(json.dumps({**sizes, **named, "intermediate_size": 48, **entries}))
    (folder / "model.safetensors").touch()
    return {"path": str(folder), "device": "cpu"}


GPT_J = {"n_embd": 32, "n_layer": 1, "n_head": 4, "rotary_dim": 4, "bos_token_id": None, "eos_token_id": None}


@pytest.mark.parametrize(
    ("family", "model_type", "architecture", "entries", "chosen", "verdict"),
    [
        ("attention", "gpt_neox", "GPTNeoXForCausalLM", {}, "torch_native", "chosen"),
        ("model", "gpt_neox", "GPTNeoXForCausalLM", {}, "transformers", "chosen"),
        (
            "model",
            "gptj",
            "GPTJForCausalLM",
            GPT_J,
            "transformers",
            "chosen, but not usable: GPTJForCausalLM chooses between",
        ),
        ("model", "bert", "BertModel", {}, "transformers", "chosen, but not usable: No model serves BertModel"),
    ],
)
def test_a_model_without_its_own_provider_is_explained_as_the_engine_serves_it(
    tmp_path, family, model_type, architecture, entries, chosen, verdict
):
    choice, others = verdicts(family, model=write_config(tmp_path, model_type, architecture, **entries))
    assert choice.name == chosen
    assert others[chosen].startswith(verdict)
    assert others.get("llama", f"does not support {architecture}") == f"does not support {architecture}"


@pytest.mark.parametrize("family", ["model", "attention"])
def test_a_named_provider_that_does_not_support_the_checkpoint_is_an_error(family, tmp_path):
    model = write_config(tmp_path, "llama", "LlamaForCausalLM") | {"architecture": "qwen"}
    said = "model.architecture is 'qwen', which does not support this checkpoint: config.json names LlamaForCausalLM"
    if family == "model":
        assert said in verdicts(family, model=model)[1]["qwen"]
        return
    with pytest.raises(UnsupportedArchitectureError, match=said):
        verdicts(family, model=model)


def test_a_named_provider_that_cannot_run_is_reported():
    _, others = verdicts("eviction", cache={"eviction": "nowhere"})
    assert others["nowhere"] == "chosen, but not usable: no luck on cpu"


@pytest.mark.parametrize("family", ["cache", "eviction", "grammar", "scheduling"])
def test_auto_is_explained_with_the_choice_of_the_registry(family):
    registry = Registry.load(platform=Platform("cpu"))
    section, _, name = FAMILIES[family].name_path.partition(".")
    config = {section: {name: "auto"}} if "." not in name else {section: {name.partition(".")[0]: {"name": "auto"}}}
    assert explain_choice(EngineConfig.model_validate(config), registry, family).name == registry.choose(family).name


def test_the_command_prints_the_line_of_the_configuration(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "engine.yaml").write_text("cache:\n  eviction: {name: fifo}\n")
    with pytest.raises(SystemExit) as caught:
        main(("plugins", "why", "eviction", "--config", "engine.yaml"))
    out = capsys.readouterr().out
    assert caught.value.code == 0
    assert out.splitlines()[0] == "eviction strategy: fifo: cache.eviction.name names it (engine.yaml:2)"
    assert any(line.split()[:2] == ["fifo", "0"] and line.split()[-1] == "chosen" for line in out.splitlines())


RIVALS = """
from dataclasses import replace
from graftlm import hookimpl
import graftlm_cache

@hookimpl
def provide_prefix_caches():
    return [one for one in graftlm_cache.provide_prefix_caches() if one.name == "chunk"]

@hookimpl
def step_finished(record):
    pass
"""


@pytest.mark.parametrize(
    ("prefer", "outcome"),
    [
        ("{}", "cannot be used until plugins.prefer selects"),
        ("{cache/chunk: rival_chunk}", "plugins.prefer selects rival"),
    ],
)
def test_a_name_offered_by_two_distributions_is_reported(prefer, outcome, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "rival_chunk", raising=False)
    (tmp_path / "rival_chunk.py").write_text(RIVALS)
    modules = ("--set", "plugins.modules=[rival_chunk]")
    with pytest.raises(SystemExit):
        main(("plugins", "why", "cache", *modules, "--set", f"plugins.prefer={prefer}"))
    told = [line for line in capsys.readouterr().out.splitlines() if line.startswith("conflict: ")]
    assert len(told) == 1
    assert told[0].startswith("conflict: 'chunk' is provided by ")
    assert outcome in told[0]
    with pytest.raises(SystemExit):
        main(("plugins", *modules))
    assert ["step_finished", "rival_chunk", "rival_chunk"] in [x.split() for x in capsys.readouterr().out.splitlines()]
