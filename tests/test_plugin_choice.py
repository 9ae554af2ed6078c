"""`graftlm plugins why`: what a configuration gets of a family, and why the others are passed over."""

import pytest

from graftlm import EngineConfig, Provider, hookimpl
from graftlm.cli import main
from graftlm.contracts import AttentionCapabilities, EvictionStrategy, Platform
from graftlm.plugin_choice import explain_choice
from graftlm.registry import FAMILIES, Registry


class Strange:
    """Offers an attention backend for pages of 4 tokens, and a strategy that runs nowhere."""

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
        ("attention", {}, "torch_native", "highest rank", "strange", "it takes page sizes 4, cache.page_size is 1"),
        ("attention", {"cache": {"page_size": 4}}, "strange", "highest rank", "torch_native", "strange has the higher"),
        ("attention", {"cache": {"page_size": 4}}, "strange", "highest rank", "early", "strange has the higher rank"),
        ("eviction", {}, "lru", "cache.eviction.name names it", "nowhere", "no luck on cpu"),
        ("eviction", {"cache": {"eviction": "auto"}}, "lru", "is auto", "fifo", "lru has the higher rank"),
        ("eviction", {"cache": {"eviction": "fifo"}}, "fifo", "names it", "lru", "could be used; name it to have it"),
        ("model", {}, "llama", "is auto", "qwen", "does not serve LlamaForCausalLM"),
        ("quantization", {}, None, "model.quantization.name is null", "int8", "could be used"),
        ("tool_calls", {}, "hermes", "the chat template is nobody's", "mistral", "template is another one's"),
        ("reasoning", {}, None, "none fits", "think", "template is another one's"),
        ("storage", {}, None, "names none", "file", "could be used"),
        ("logits_processor", {}, None, "requests name", None, None),
    ],
)
def test_the_choice_and_the_others_are_explained(family, config, chosen, reason, other, verdict):
    choice, others = verdicts(family, **config)
    assert choice.name == chosen
    assert reason in choice.reason
    if other is not None:
        assert verdict in others[other]


def test_what_is_named_although_it_cannot_run_says_so():
    _, others = verdicts("eviction", cache={"eviction": "nowhere"})
    assert others["nowhere"] == "chosen, but: no luck on cpu"


@pytest.mark.parametrize("family", ["cache", "eviction", "grammar", "scheduling"])
def test_auto_is_explained_as_the_registry_chooses(family):
    registry = Registry.load(platform=Platform("cpu"))
    section, _, name = FAMILIES[family].name_path.partition(".")
    config = {section: {name: "auto"}} if "." not in name else {section: {name.partition(".")[0]: {"name": "auto"}}}
    assert explain_choice(EngineConfig.model_validate(config), registry, family).name == registry.choose(family).name


def test_the_command_prints_where_the_name_stands(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "engine.yaml").write_text("cache:\n  eviction: {name: fifo}\n")
    with pytest.raises(SystemExit) as caught:
        main(("plugins", "why", "eviction", "--config", "engine.yaml"))
    out = capsys.readouterr().out
    assert caught.value.code == 0
    assert out.splitlines()[0] == "eviction strategy: fifo: cache.eviction.name names it (engine.yaml:2)"
    assert any(line.split()[:2] == ["fifo", "0"] and line.split()[-1] == "chosen" for line in out.splitlines())
