"""The engine's log line with the plugin of each family and the reason."""

import logging

import pytest

from graftlm import Engine
from graftlm.assembly.resolved_plugins import resolve_plugins, resolved_line
from graftlm.assembly.start_plan import plan_start
from graftlm.assembly.target import detect_platform
from graftlm.chat.chat_formats import choose_chat_formats
from graftlm.config import EngineConfig
from graftlm.registry import Registry


def test_each_choice_has_its_reason(tmp_path):
    file = tmp_path / "engine.yaml"
    file.write_text("cache: chunk\ngrammar: auto\n")
    config = EngineConfig.load(file, ["scheduling.policy=fcfs"])
    registry = Registry.load()
    attention = registry.choose("attention")
    found = resolve_plugins(config, registry, {"attention": attention, "reasoning": None}, device="cpu/float32")
    assert set(found["cache"]) == {"name", "distribution", "why"}
    assert found["cache"]["name"] == "chunk"
    assert found["cache"]["distribution"].startswith("graftlm")
    assert found["cache"]["why"] == f"cache.name: {file}:1"
    assert found["scheduling"]["why"] == "scheduling.policy.name: --set"
    assert found["eviction"]["why"] == "cache.eviction.name: the default"
    assert found["attention"]["why"] == "auto: the highest rank that fits cpu/float32"
    assert found["grammar"]["why"] == "auto: the highest rank that runs on this machine"
    assert not {"reasoning", "model"} & found.keys()


@pytest.mark.parametrize(
    ("chat_template", "why"),
    [
        ("emit <tool_call>", "auto: the highest rank that fits the chat template"),
        ("{{ messages }}", "auto: the highest rank, because no format fits the chat template"),
    ],
)
def test_the_reason_for_a_chat_format_is_the_chat_template(chat_template, why):
    config, registry = EngineConfig(), Registry.load()
    formats = choose_chat_formats(config, registry, chat_template)
    found = resolve_plugins(config, registry, formats, chat_template=chat_template)
    assert found["tool_calls"]["why"] == why


def test_a_dry_run_has_the_reasons_of_a_start():
    config, registry = EngineConfig(), Registry.load()
    with Engine(config) as engine:
        resolved = engine._parts.resolved
    plan = plan_start(config, registry, detect_platform(config))
    for family in ("attention", "model"):
        assert any(line.startswith(f"plugin: {family} = ") and f"({resolved[family]['why']})" in line for line in plan)
    assert any("tool_calls = hermes" in line and "because no format fits the chat template" in line for line in plan)


def test_an_engine_logs_its_choices_in_one_line(caplog):
    caplog.set_level(logging.INFO, "graftlm")
    with Engine(model="demo", memory={"kv_tokens": 64}) as engine:
        resolved = engine._parts.resolved
    lines = [line for line in caplog.messages if line.startswith("resolved: ")]
    assert lines == [resolved_line(resolved)]
    assert f"attention={resolved['attention']['name']} (auto: the highest rank that fits cpu/" in lines[0]
    assert "cache=radix (cache.name: the default)" in lines[0]
