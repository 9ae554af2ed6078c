"""Configuration: defaults, short forms, YAML with lines, variables, overrides, sources, docs."""

import json
import pickle
import re
from pathlib import Path

import pytest
import yaml
from pydantic import SecretStr

from graftlm.config import CacheSettings, EngineConfig, EvictionSettings, explain
from graftlm.config.layers import Origin, given, merge
from graftlm.errors import ConfigError, GraftlmError

DOCS = Path(__file__).parents[2] / "docs" / "configuration.md"


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Write engine.yaml into an empty working directory, and return the file name that messages show."""
    monkeypatch.chdir(tmp_path)

    def write_file(text: str) -> str:
        Path("engine.yaml").write_text(text, encoding="utf-8")
        return "engine.yaml"

    return write_file


def errors_of(*args, **kwargs) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        EngineConfig.load(*args, **kwargs)
    return str(caught.value).splitlines()


def sources_of(config: EngineConfig) -> dict[str, str]:
    return {path: source for path, source in config.sources.items() if source != "default"}


def test_defaults_are_the_documented_ones():
    assert EngineConfig().model_dump() == {
        "model": {
            "path": "demo",
            "download": False,
            "dtype": "auto",
            "device": "auto",
            "architecture": "auto",
            "context_len": None,
            "trust_remote_code": False,
            "native_ops": True,
            "kernels": "auto",
            "prepack": True,
            "quantization": {"name": None, "options": {}},
        },
        "attention": {"name": "auto", "options": {}},
        "cache": {"name": "radix", "page_size": 1, "options": {}, "eviction": {"name": "lru", "options": {}}},
        "grammar": {
            "name": "auto",
            "options": {},
            "timeout_s": 30.0,
            "jump_forward": "fast",
            "cache_size": 256,
            "preload": False,
        },
        "chat": {"template": None, "tool_call_format": "auto", "reasoning_format": "auto"},
        "media": {
            "name": "auto",
            "options": {},
            "max_items": 16,
            "max_bytes": 20 * 2**20,
            "max_pixels": 32 * 2**20,
            "allowed_hosts": (),
            "download_timeout_s": 10.0,
            "feature_bytes": 256 * 2**20,
            "prepared_bytes": 256 * 2**20,
        },
        "scheduling": {
            "policy": {"name": "lpm", "options": {}},
            "max_running_requests": 64,
            "max_queued_requests": 1024,
            "prefill_tokens_per_step": 2048,
            "mix_chunks": True,
            "overlap": True,
        },
        "speculation": {"drafter": {"name": None, "options": {}}, "first": (), "max_drafts": 15},
        "lora": {"adapters": {}, "enabled": None, "max_loaded": 8, "max_rank": 64, "target_modules": None},
        "execution": {"graphs": "auto", "graph_batch_sizes": None},
        "memory": {
            "kv_tokens": None,
            "window_tokens": None,
            "kv_fraction": 0.8,
            "state_snapshots": None,
            "kv_dtype": "auto",
        },
        "parallel": {
            "data": 1,
            "tensor": 1,
            "executor": "auto",
            "options": {},
            "routing": {"name": "auto", "options": {}},
        },
        "server": {
            "host": "127.0.0.1",
            "port": 30000,
            "allowed_hosts": None,
            "api_key": None,
            "allow_anonymous": False,
            "admin_api_key": None,
            "open_admin": False,
            "checkpoint_roots": (),
            "served_model_name": None,
            "model_names": (),
            "request_timeout_s": None,
            "max_body_bytes": 33554432,
            "max_header_bytes": 65536,
            "max_connections": None,
            "header_timeout_s": 15.0,
            "stall_timeout_s": 30.0,
            "cors_origins": (),
            "restart": False,
            "drain_timeout_s": 30.0,
            "watchdog_s": 120.0,
            "trainer_hosts": (),
            "trainer_timeout_s": 300.0,
            "profile_dir": "profiles",
            "kv_events": {
                "endpoint": None,
                "format": "graftlm",
                "replay_endpoint": None,
                "replay_mib": 64,
                "topic": "",
            },
            "record_trace": None,
            "metrics_aliases": (),
            "clip_max_tokens": False,
            "traces": {
                "enabled": None,
                "endpoint": None,
                "sample_ratio": None,
                "service_name": None,
                "headers": {},
            },
            "files": {"path": None, "max_file_bytes": 2**29, "max_bytes": 2**34},
            "batches": {"max_running": 16, "max_running_beside": 0, "priority": -1000, "max_requests": 50000},
            "response_store": {"kind": "memory", "path": None, "max_responses": 1000, "max_bytes": 268435456},
            "log_format": "text",
            "log_level": "info",
            "log_interval_s": 10.0,
        },
        "plugins": {"modules": (), "disabled": (), "prefer": {}},
        "debug": False,
    }


@pytest.mark.parametrize(
    ("values", "path", "expected"),
    [
        ({"model": "demo2"}, "model.path", "demo2"),
        ({"attention": "triton"}, "attention.name", "triton"),
        ({"cache": "chunk"}, "cache.name", "chunk"),
        ({"cache": {"eviction": "lfu"}}, "cache.eviction.name", "lfu"),
        ({"grammar": "xgrammar"}, "grammar.name", "xgrammar"),
        ({"scheduling": {"policy": "fcfs"}}, "scheduling.policy.name", "fcfs"),
        ({"speculation": "auto"}, "speculation.drafter.name", "auto"),
        ({"speculation": "none"}, "speculation.drafter.name", None),
        ({"speculation": None}, "speculation.drafter.name", None),
        ({"speculation": {"drafter": {"name": "suffix"}, "max_drafts": 64}}, "speculation.max_drafts", 64),
        ({"cache": None}, "cache.name", "radix"),
        ({"cache": {"page_size": "16"}}, "cache.page_size", 16),
        ({"cache": CacheSettings(page_size=8)}, "cache.page_size", 8),
        ({"cache": {"eviction": EvictionSettings(name="lfu")}}, "cache.eviction.name", "lfu"),
        ({"plugins": {"modules": ["a", "b"]}}, "plugins.modules", ["a", "b"]),
        ({"scheduling": {"overlap": "false"}}, "scheduling.overlap", False),
        ({"memory": {"kv_tokens": 4096.0}}, "memory.kv_tokens", 4096),
        ({"server": {"metrics_aliases": "vllm"}}, "server.metrics_aliases", ["vllm"]),
        ({"server": {"metrics_aliases": ["vllm", "sglang"]}}, "server.metrics_aliases", ["vllm", "sglang"]),
    ],
)
@pytest.mark.parametrize(
    "make", [EngineConfig.load, lambda values: EngineConfig(**values)], ids=["load", "constructor"]
)
def test_a_value_may_have_a_short_form_or_be_a_string(make, values, path, expected):
    assert {setting.path: setting.value for setting in explain(make(values))}[path] == expected


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"cache": {"evicton": "lru"}}, "cache.evicton: unknown key; did you mean 'eviction'?"),
        ({"Cache": "radix"}, "Cache: unknown key; did you mean 'cache'?"),
        ({"page_size": 16}, "page_size: unknown key; did you mean 'cache.page_size'?"),
        (
            {"memory": {"zzz": 1}},
            "memory.zzz: unknown key; known keys: kv_tokens, window_tokens, kv_fraction, state_snapshots, kv_dtype",
        ),
        ({"cache": {"page_size": 24}}, "cache.page_size: must be a power of two, got 24"),
        ({"cache": {"page_size": 0}}, "cache.page_size: must be at least 1, got 0"),
        ({"cache": {"page_size": 2048}}, "cache.page_size: must be at most 1024, got 2048"),
        ({"cache": {"page_size": True}}, "cache.page_size: must be a number, got True"),
        ({"cache": {"page_size": 1.5}}, "cache.page_size: must be a whole number, got 1.5"),
        ({"cache": {"page_size": "many"}}, "cache.page_size: must be a whole number, got 'many'"),
        ({"cache": 3}, "cache: must be a mapping of keys to values, got 3"),
        ({"cache": {"options": [1]}}, "cache.options: must be a mapping of keys to values, got [1]"),
        ({"cache": ""}, "cache.name: must not be empty, got ''"),
        ({"model": {"path": 7}}, "model.path: must be a string, got 7; put it in quotes"),
        ({"model": {"device": "cda"}},
         "model.device: must be 'auto', 'cpu' or 'cuda', got 'cda'; did you mean 'cuda'?"),
        ({"model": {"context_len": 0}}, "model.context_len: must be at least 1, got 0"),
        ({"model": {"quantization": 8}}, "model.quantization: must be a mapping of keys to values, got 8"),
        ({"model": {"quantization": "auto"}},
         "model.quantization.name: must be the name of a quantization, or null for no quantization; 'auto' is not "
         "supported, got 'auto'"),
        ({"model": {"trust_remote_code": "perhaps"}}, "model.trust_remote_code: must be true or false, got 'perhaps'"),
        ({"memory": {"kv_fraction": 0}}, "memory.kv_fraction: must be above 0.0, got 0"),
        ({"memory": {"kv_fraction": 1}}, "memory.kv_fraction: must be below 1.0, got 1"),
        ({"memory": {"kv_fraction": float("nan")}}, "memory.kv_fraction: must be below 1.0, got nan"),
        ({"memory": {"kv_fraction": "half"}}, "memory.kv_fraction: must be a number, got 'half'"),
        ({"memory": {"kv_tokens": 8}, "cache": {"page_size": 16}},
         "memory.kv_tokens: must be at least one page of cache.page_size 16, got 8"),
        ({"scheduling": {"max_running_requests": 0}}, "scheduling.max_running_requests: must be at least 1, got 0"),
        ({"scheduling": {"max_queued_requests": 0}}, "scheduling.max_queued_requests: must be at least 1, got 0"),
        ({"speculation": {"max_drafts": 0}}, "speculation.max_drafts: must be at least 1, got 0"),
        ({"speculation": {"max_drafts": 65}}, "speculation.max_drafts: must be at most 64, got 65"),
        ({"speculation": {"max_drafts": True}}, "speculation.max_drafts: must be a number, got True"),
        ({"scheduling": {"prefill_tokens_per_step": 0}},
         "scheduling.prefill_tokens_per_step: must be at least 1, got 0"),
        ({"server": {"port": 65536}}, "server.port: must be at most 65535, got 65536"),
        ({"server": {"api_key": ["s3cret"]}}, "server.api_key: must be a string, got a value that is not shown"),
        ({"server": ["s3cret"]}, "server: must be a mapping of keys to values, got a value that is not shown"),
        ({"server": {"admin_api_key": "s3cret", "open_admin": True}},
         "server.open_admin: gives every client administrator rights, so server.admin_api_key has no effect; "
         "remove one of them"),
        ({"server": {"response_store": {"kind": "sqlite"}}},
         "server.response_store: path is the file of kind 'sqlite': set both, or neither, "
         "got {'kind': 'sqlite'}"),
        ({"server": {"response_store": {"path": "a.db"}}},
         "server.response_store: path is the file of kind 'sqlite': set both, or neither, "
         "got {'path': 'a.db'}"),
        ({"server": {"api_key": "s3cret", "admin_api_key": "s3cret"}},
         "server.admin_api_key: is equal to server.api_key, so every client has administrator rights; "
         "use different keys"),
        ({"plugins": {"modules": "one"}}, "plugins.modules: must be a list, got 'one'"),
        ({"plugins": {"modules": ["one", 2]}}, "plugins.modules[1]: must be a string, got 2; put it in quotes"),
        ({"cache": {1: 2}}, "cache: keys must be strings, got 1"),
        ({"model": {"path": ["x" * 100]}}, "model.path: must be a string, got ['" + "x" * 55 + "..."),
    ],
)  # fmt: skip
@pytest.mark.parametrize(
    "make", [EngineConfig.load, lambda values: EngineConfig(**values)], ids=["load", "constructor"]
)
def test_the_error_for_a_wrong_value_says_what_is_expected(make, values, message):
    with pytest.raises(ConfigError) as caught:
        make(values)
    assert str(caught.value) == message


def test_the_error_for_a_file_has_file_line_path_and_nearest_name(write):
    file = write("# engine\nmodel:\n  path: demo\n\n\ncache:\n  evicton: lru\n")
    assert errors_of(file) == ["engine.yaml:7: cache.evicton: unknown key; did you mean 'eviction'?"]


def test_all_errors_of_a_file_are_listed_in_order_of_lines(write):
    file = write(
        "server: {port: 99999}\n"
        "cache:\n"
        "  page_size: 24\n"
        "  page_size: 16\n"
        "  7: x\n"
        "attention: ${NOPE}\n"
        "modle: demo\n"
        "grammar: !weird x\n"
    )
    assert errors_of(file, environment={}) == [
        "engine.yaml:1: server.port: must be at most 65535, got 99999",
        "engine.yaml:3: cache.page_size: must be a power of two, got 24",
        "engine.yaml:4: cache.page_size: duplicate key; it is already in line 3",
        "engine.yaml:5: cache: keys must be strings, got 7; put it in quotes",
        "engine.yaml:6: attention: environment variable NOPE is not set; set it, or write ${NOPE:-default}",
        "engine.yaml:7: modle: unknown key; did you mean 'model'?",
        "engine.yaml:8: grammar: cannot be read as a value: could not determine a constructor for the tag '!weird'",
    ]


@pytest.mark.parametrize(
    ("text", "start"),
    [
        ("model: demo\ncache: [1\n", "engine.yaml:3: not valid YAML: while parsing a flow sequence: "),
        ("model: demo\n\tcache: x\n", "engine.yaml:2: not valid YAML: "),
        ("model: a\n---\nmodel: b\n", "engine.yaml:2: not valid YAML: expected a single document"),
        ("model: \x00\n", "engine.yaml: not valid YAML: unacceptable character"),
        ("- model\n", "engine.yaml: must be a mapping of keys to values, got list"),
        ("demo", "engine.yaml: must be a mapping of keys to values, got str"),
        ("cache: &a {options: {x: *a}}", "engine.yaml:1: cache.options.x: an alias must not refer to a value"),
        ("cache: &a {<<: *a}", "engine.yaml:1: cache: an alias must not refer to a value that contains it"),
        ("cache: {<<: 3}", "engine.yaml:1: cache: the value of '<<' must be a mapping or a list of mappings"),
        ("cache: {[1]: 3}", "engine.yaml:1: cache: keys must be strings, got a collection"),
    ],
)  # fmt: skip
def test_broken_yaml_is_reported_with_its_line(write, text, start):
    assert errors_of(write(text))[0].startswith(start)


def test_an_unreadable_file_is_reported(write, tmp_path):
    write("")
    Path("latin.yaml").write_bytes(b"model: caf\xe9\n")
    assert errors_of("gone.yaml") == ["gone.yaml: no such file"]
    assert errors_of("demo") == ["demo: no such file; for a model, write model='demo'"]
    assert errors_of("latin.yaml")[0].startswith("latin.yaml: cannot be read: ")
    assert errors_of(tmp_path)[0].startswith(f"{tmp_path}: cannot be read: ")
    assert errors_of(7) == ["a configuration must be a file, a mapping or an EngineConfig, got int"]


@pytest.mark.parametrize("text", ["", "# nothing\n", "cache:\nserver:\n"])
def test_an_empty_file_or_section_means_the_defaults(write, text):
    assert EngineConfig.load(write(text)) == EngineConfig()


def test_yaml_anchors_and_merge_keys_work(write):
    file = write("cache: {options: &base {a: 1, b: 2}}\nattention:\n  options: {<<: *base, b: 3}\n")
    config = EngineConfig.load(file)
    assert config.attention.options == {"a": 1, "b": 3}
    assert config.sources["attention.options.a"] == "engine.yaml:1"


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("${NUMBER}", 8),
        ('"${NUMBER}"', "8"),
        ("${FLAG}", True),
        ("${NOTHING:-}", None),
        ("${UNSET:-2.5}", 2.5),
        ("${EMPTY:-full}", "full"),
        ("${YAML}", "{a: 1} # x"),
        ("${DATE}", "2024-01-01"),
        ("a${NUMBER}b${UNSET:-c}", "a8bc"),
        ("$$NUMBER $${NUMBER} $ ^a$", "$NUMBER ${NUMBER} $ ^a$"),
        ("[x, '${NUMBER}']", ["x", "8"]),
        ("|\n      ${NUMBER}", "8\n"),
    ],
)
def test_variables_are_expanded(write, written, value):
    environment = {"NUMBER": "8", "FLAG": "true", "EMPTY": "", "YAML": "{a: 1} # x", "DATE": "2024-01-01"}
    config = EngineConfig.load(write(f"cache:\n  options:\n    x: {written}\n"), environment=environment)
    assert config.cache.options == {"x": value}


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("${UNSET}", "environment variable UNSET is not set; set it, or write ${UNSET:-default}"),
        ("a ${EMPTY}", "environment variable EMPTY is empty; set it, or write ${EMPTY:-default}"),
        ("${1X}", "'${' is not followed by a variable; write ${NAME}, ${NAME:-default}, or $$ for a dollar sign"),
        ("${OPEN", "'${' is not followed by a variable; write ${NAME}, ${NAME:-default}, or $$ for a dollar sign"),
        ("${A:-${B}}", "'${' is not followed by a variable; write ${NAME}, ${NAME:-default}, or $$ for a dollar sign"),
    ],
)
def test_a_variable_that_cannot_be_expanded_is_an_error_with_its_line(write, written, message):
    file = write(f"cache:\n  options:\n    x: {written}\n")
    assert errors_of(file, environment={"EMPTY": ""}) == [f"engine.yaml:3: cache.options.x: {message}"]


def test_variables_come_from_the_process_environment_by_default(write, monkeypatch):
    monkeypatch.setenv("GRAFTLM_TEST_PORT", "1234")
    assert EngineConfig.load(write("server: \n  port: ${GRAFTLM_TEST_PORT}\n")).server.port == 1234


def test_variables_are_expanded_only_in_files():
    config = EngineConfig.load({"cache": {"options": {"a": "${X}"}}}, ["cache.options.b=${X}"])
    assert config.cache.options == {"a": "${X}", "b": "${X}"}


@pytest.mark.parametrize(
    ("override", "path", "value"),
    [
        ("cache.page_size=16", "cache.page_size", 16),
        ("cache.eviction=lfu", "cache.eviction.name", "lfu"),
        ("cache={page_size: 4}", "cache.page_size", 4),
        ("cache.options.foo=1", "cache.options.foo", 1),
        ("cache.options.deep.er=[1, two]", "cache.options.deep.er", [1, "two"]),
        ("memory.kv_tokens=", "memory.kv_tokens", None),
        ("model.path=a=b", "model.path", "a=b"),
        ("plugins.prefer.eviction/lru=their-dist", "plugins.prefer.eviction/lru", "their-dist"),
        ("debug=true", "debug", True),
    ],
)
def test_an_override_is_a_dotted_path_and_a_yaml_value(override, path, value):
    config = EngineConfig.load(overrides=[override])
    assert {s.path: (s.value, s.source) for s in explain(config)}[path] == (value, "--set")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("cache.evicton=lru", "--set: cache.evicton: unknown key; did you mean 'eviction'?"),
        ("cahce.page_size=1", "--set: cahce: unknown key; did you mean 'cache'?"),
        ("cache.page_size.x=1", "--set: cache.page_size: must be a whole number, got {'x': 1}"),
        ("cache.page_size", "--set 'cache.page_size': must be path=value, such as cache.page_size=16"),
        ("=1", "--set '=1': must be path=value, such as cache.page_size=16"),
        ("a..b=1", "--set 'a..b=1': must be path=value, such as cache.page_size=16"),
        ("cache={a: 1, a: 2}", "--set: cache.a: unknown key; known keys: name, page_size, options, eviction; "
                               "a plugin's own options belong under `options`\n"
                               "--set: cache.a: duplicate key; it is already in line 1"),
    ],
)  # fmt: skip
def test_a_wrong_override_is_reported(override, message):
    assert sorted(errors_of(overrides=[override])) == sorted(message.splitlines())


def test_an_override_that_is_not_yaml_is_an_error():
    assert errors_of(overrides=["cache.options=["])[0].startswith("--set: cache.options:1: not valid YAML: ")


def test_file_fields_and_overrides_are_merged_key_by_key(write):
    file = write("cache: {name: chunk, page_size: 4, options: {a: 1, b: 1, c: 1}}\nserver: {port: 1}\n")
    config = EngineConfig.load(file, ["cache.options.c=3"], cache={"options": {"b": 2, "c": 2}}, debug=True)
    assert config.cache == CacheSettings(name="chunk", page_size=4, options={"a": 1, "b": 2, "c": 3})
    assert sources_of(config) == {
        "cache.name": "engine.yaml:1",
        "cache.page_size": "engine.yaml:1",
        "cache.options.a": "engine.yaml:1",
        "cache.options.b": "given",
        "cache.options.c": "--set",
        "server.port": "engine.yaml:2",
        "debug": "given",
    }


def test_a_value_that_replaces_a_mapping_also_replaces_its_sources():
    config = EngineConfig.load({"cache": {"options": {"x": {"y": 1}}}}, ["cache.options.x=2"])
    assert sources_of(config) == {"cache.options.x": "--set"}


def test_origins_belong_to_the_values_that_remain():
    layers = [{"a": {"b": {"c": 1}, "d": 2}}, {"a": {"b": 3}}, {"a": 4}, {"a": {"b": {"e": 5}}}, {"a": {"b": {"c": 6}}}]
    expected = [
        {("a",): 0, ("a", "b"): 0, ("a", "b", "c"): 0, ("a", "d"): 0},
        {("a",): 1, ("a", "b"): 1, ("a", "d"): 0},
        {("a",): 2},
        {("a",): 3, ("a", "b"): 3, ("a", "b", "e"): 3},
        {("a",): 4, ("a", "b"): 4, ("a", "b", "c"): 4, ("a", "b", "e"): 3},
    ]
    for num_layers, origins in enumerate(expected, 1):
        merged = merge([given(values, Origin(str(i))) for i, values in enumerate(layers[:num_layers])])
        assert {path: int(origin.source) for path, origin in merged.origins.items()} == origins


def test_sources_include_variable_names(write):
    file = write("server:\n  port: ${PORT}\n  host: ${A:-0}.${B:-0}.0.0\n  api_key: ${KEY}\n")
    config = EngineConfig.load(file, environment={"PORT": "80", "KEY": "s3cret"})
    assert sources_of(config) == {
        "server.port": "engine.yaml:2 (${PORT})",
        "server.host": "engine.yaml:3 (${A}, ${B})",
        "server.api_key": "engine.yaml:4 (${KEY})",
    }


def test_an_error_names_the_layer_that_set_the_value(write):
    file = write("cache:\n  page_size: 3\nmodel: 5\n")
    assert errors_of(file, ["cache.page_size=5"], server={"port": -1}) == [
        "--set: cache.page_size: must be a power of two, got 5",
        "server.port: must be at least 0, got -1",
        "engine.yaml:3: model: must be a mapping of keys to values, got 5",
    ]


def test_a_config_may_be_loaded_again_with_changes_and_keeps_its_sources(write):
    config = EngineConfig.load(write("cache: chunk\nserver: {api_key: k}\n"))
    assert EngineConfig.load(config) == config
    changed = EngineConfig.load(config, ["debug=true"])
    assert sources_of(changed) == {"cache.name": "engine.yaml:1", "server.api_key": "engine.yaml:2", "debug": "--set"}
    assert changed.server.api_key == SecretStr("k")


def test_a_copy_with_updates_reports_them_as_given():
    assert sources_of(EngineConfig().model_copy(update={"debug": True})) == {"debug": "given"}


def test_configurations_with_equal_values_are_equal(write):
    assert (
        EngineConfig.load(write("cache: radix\n")) == EngineConfig.load({"cache": {"name": "radix"}}) == EngineConfig()
    )
    assert EngineConfig(debug=True) != EngineConfig()
    assert EngineConfig() != {}


def test_a_configuration_is_immutable():
    with pytest.raises(ValueError, match="frozen"):
        EngineConfig().debug = True


def test_a_config_survives_pickling(write):
    config = EngineConfig.load(write("cache: chunk\n"))
    copy = pickle.loads(pickle.dumps(config))
    assert (copy, copy.sources) == (config, config.sources)


def test_the_api_key_is_never_printed(write):
    config = EngineConfig.load(write("server: {api_key: s3cret}\n"))
    shown = [repr(config), str(config), str(explain(config)), config.model_dump_json()]
    assert not any("s3cret" in text for text in shown)
    assert config.server.api_key is not None
    assert config.server.api_key.get_secret_value() == "s3cret"


def test_a_config_error_is_a_graftlm_error_and_a_value_error():
    with pytest.raises(GraftlmError):
        EngineConfig(nope=1)
    with pytest.raises(ValueError, match="nope"):
        EngineConfig(nope=1)


@pytest.mark.parametrize(
    ("speculation", "message"),
    [
        ({"first": ["radix"]}, "but drafter is null; set drafter to the last drafter's name"),
        ({"first": ["radix"], "drafter": "auto"}, "but drafter is auto; set drafter to the last drafter's name"),
        ({"first": ["a", "b", "a"], "drafter": "c"}, "names of different drafters, and not that of drafter, got a"),
        ({"first": ["c"], "drafter": "c"}, "names of different drafters, and not that of drafter, got c"),
        ({"first": ["auto"], "drafter": "c"}, "names of different drafters, and not that of drafter, got auto"),
    ],
)
def test_the_order_of_drafters_is_checked(speculation, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        EngineConfig(speculation=speculation)


def test_docs_list_every_field_with_its_default():
    rows = re.findall(r"^\| `([\w.]+)` \| `([^`]*)` \| (.+) \|$", DOCS.read_text(encoding="utf-8"), re.MULTILINE)
    documented = {path: yaml.safe_load(default) for path, default, _ in rows}
    assert documented == {setting.path: setting.value for setting in explain(EngineConfig())}
    assert len(rows) == len(documented)


def test_the_examples_in_the_docs_load(write):
    examples = re.findall(r"```yaml\n(.*?)```", DOCS.read_text(encoding="utf-8"), re.DOTALL)
    assert examples
    for example in examples:
        EngineConfig.load(write(example), environment={"GRAFTLM_API_KEY": "k"})


def test_numeric_bounds_are_in_the_json_schema():
    text = json.dumps(EngineConfig.model_json_schema())
    assert not re.search(r'"(ge|gt|le|lt)":', text)  # pydantic writes these if it cannot translate a bound


def test_the_json_schema_of_the_sections_has_a_description_for_every_field():
    schema = EngineConfig.model_json_schema()
    for name, section in schema["$defs"].items():
        for field, value in section["properties"].items():
            assert "$ref" in json.dumps(value) or "description" in value, f"{name}.{field}"


def test_unknown_keys_do_not_hide_errors_that_involve_several_fields():
    found = errors_of({"server": {"prt": 1, "api_key": "a", "admin_api_key": "a"}})
    assert [line.split(": ")[:2] for line in found] == [
        ["server.prt", "unknown key; did you mean 'port'?"],
        [
            "server.admin_api_key",
            "is equal to server.api_key, so every client has administrator rights; use different keys",
        ],
    ]


def test_unknown_keys_can_be_dropped():
    source = {"cache": {"page_siz": 1, "page_size": 8, "options": {"any": 1}}, "nope": {}}
    config = EngineConfig.load(source, leave_out_unknown=True)
    assert config == EngineConfig.load({"cache": {"page_size": 8, "options": {"any": 1}}})


@pytest.mark.parametrize(("name", "shown"), [("auto", "auto"), ("none", "null"), (None, "null")])
def test_options_without_the_name_of_a_drafter_are_refused(name, shown):
    drafter = {"name": name, "options": {"min_match_tokens": 3}}
    with pytest.raises(
        ConfigError, match=rf"speculation\.drafter: `options` need the name of one drafter, but `name` is {shown}; "
    ):
        EngineConfig.load({"model": "demo", "speculation": {"drafter": drafter}})
