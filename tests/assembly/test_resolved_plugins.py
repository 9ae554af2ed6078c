"""The engine's log line with the plugin of each family and the reason."""

import logging

from graftlm import Engine
from graftlm.assembly.resolved_plugins import resolve_plugins, resolved_line
from graftlm.config import EngineConfig
from graftlm.registry import Registry


def test_each_choice_has_its_reason(tmp_path):
    file = tmp_path / "engine.yaml"
    file.write_text("cache: chunk\ngrammar: auto\n")
    config = EngineConfig.load(file, ["scheduling.policy=fcfs"])
    registry = Registry.load()
    attention = registry.choose("attention")
    found = resolve_plugins(config, registry, {"attention": attention, "reasoning": None}, "cpu/float32")
    assert set(found["cache"]) == {"name", "distribution", "why"}
    assert found["cache"]["name"] == "chunk"
    assert found["cache"]["distribution"].startswith("graftlm")
    assert found["cache"]["why"] == f"cache.name: {file}:1"
    assert found["scheduling"]["why"] == "scheduling.policy.name: --set"
    assert found["eviction"]["why"] == "cache.eviction.name: the default"
    assert found["attention"]["why"] == "auto: the highest rank that fits cpu/float32"
    assert found["grammar"]["why"] == "auto: the highest rank that runs on this machine"
    assert not {"reasoning", "model"} & found.keys()


def test_an_engine_logs_its_choices_in_one_line(caplog):
    caplog.set_level(logging.INFO, "graftlm")
    with Engine(model="demo", memory={"kv_tokens": 64}) as engine:
        resolved = engine._parts.resolved
    lines = [line for line in caplog.messages if line.startswith("resolved: ")]
    assert lines == [resolved_line(resolved)]
    assert f"attention={resolved['attention']['name']} (auto: the highest rank that fits cpu/" in lines[0]
    assert "cache=radix (cache.name: the default)" in lines[0]
