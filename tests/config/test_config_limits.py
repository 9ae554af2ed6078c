"""A configuration beyond the size limits is refused quickly, with the line, in a short message."""

import time

import pytest

from graftlm.config import EngineConfig
from graftlm.errors import ConfigError

LIMIT_S = 5.0  # CPU time of this thread in seconds; without the limits, nine lines took 40 s or never ended

LAUGHS = "a0: &a0 {x: 1}\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 10))
MAPPED_LAUGHS = "a0: &a0 1\n" + "".join(
    f"a{i}: &a{i} {{{', '.join(f'k{j}: *a{i - 1}' for j in range(9))}}}\n" for i in range(1, 10)
)
MERGED_LAUGHS = "a0: &a0 {x: 1}\n" + "".join(
    f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 9)}]}}\n" for i in range(1, 10)
)
DEEP = "a0: &a0 1\n" + "".join(f"a{i}: &a{i} [*a{i - 1}]\n" for i in range(1, 1200))
DEEP_MERGES = "a0: &a0 {x: 1}\n" + "".join(f"a{i}: &a{i} {{<<: *a{i - 1}}}\n" for i in range(1, 1200))
LONG_TEXT = f"a: &a {'x' * 100_000}\nb: [{', '.join(['*a'] * 100)}]\n"

TOO_LARGE = {
    "aliases of lists": (LAUGHS, ":[0-9]+: with expanded aliases, there are more than 40,000 keys and values"),
    "aliases of mappings": (MAPPED_LAUGHS, ":[0-9]+: with expanded aliases, there are more than 40,000 keys"),
    "merges": (MERGED_LAUGHS, ":[0-9]+: with expanded aliases, there are more than 40,000 keys and values"),
    "deep aliases": (DEEP, ":[0-9]+: with expanded aliases, lists and mappings are nested more than 100 deep"),
    "deep merges": (DEEP_MERGES, ":[0-9]+: with expanded aliases, lists and mappings are nested more than 100"),
    "long texts": (LONG_TEXT, ":1: with expanded aliases and variables, there are more than 4,194,304 characters"),
    "open brackets": ("x: " + "[" * 3000, ":1: lists and mappings are nested more than 100 deep"),
    "closed brackets": ("\n\nx: " + "[" * 3000 + "]" * 3000, ":3: lists and mappings are nested more than 100 deep"),
    "braces": ("x: " + "{a: " * 3000 + "}" * 3000, ":1: lists and mappings are nested more than 100 deep"),
    "dashes": ("x:\n" + "- " * 3000 + "1\n", ":2: lists and mappings are nested more than 100 deep"),
    "values": (f"x: [{'1,' * 50_000}]", ":1: there are more than 40,000 keys and values"),
    "a long number": (f"x: {'1' * 5000}", ":1: x: cannot be read as a value: got 5,000 characters"),
    "a sexagesimal number": (f"x: {'1:' * 100_000}1", ":1: x: cannot be read as a value: got 200,001 characters"),
    "bytes of characters": (
        f"#{'é' * 600_000}",
        ": is larger than the maximum size of a configuration, 1,048,576 bytes",
    ),
    "bytes": ("# " + "x" * 2_000_000, ": is larger than the maximum size of a configuration, 1,048,576 bytes"),
}


def refused(*arguments, **keywords):
    """Return the error that refuses a configuration."""
    start_s = time.thread_time()
    with pytest.raises(ConfigError) as caught:
        EngineConfig.load(*arguments, **keywords)
    assert time.thread_time() - start_s < LIMIT_S
    assert all(len(line) < 2500 for line in str(caught.value).splitlines())
    return caught


@pytest.mark.parametrize("name", TOO_LARGE)
def test_a_file_that_is_too_large_is_refused_with_its_line(tmp_path, name):
    text, message = TOO_LARGE[name]
    file = tmp_path / "engine.yaml"
    file.write_text(text)
    refused(file).match(rf"engine\.yaml{message}")


@pytest.mark.parametrize("name", sorted(set(TOO_LARGE) - {"bytes", "bytes of characters"}))
def test_an_override_has_the_same_limits(name):
    text, _ = TOO_LARGE[name]
    if "\n" in text.strip():
        text = f"\n{text}"
    refused(None, [f"cache.options.x={text}"]).match(r"--set: cache\.options\.x")


def test_a_long_override_is_refused():
    refused(None, [f"cache.options.x='{'x' * 2_000_000}'"]).match("has 2,000,002 characters, expected at most 1,048")
    refused(None, [".".join("x" * 3000) + "=1"]).match("has 3,000 parts, expected at most 100")
    refused(None, ["x" * 100_000]).match("must be path=value")


def test_variables_have_the_same_limits(tmp_path):
    file = tmp_path / "engine.yaml"
    file.write_text(f"cache:\n  options:\n    x: {'${LONG}' * 100_000}\n")
    environment = {"LONG": "x" * 100_000}
    refused(file, environment=environment).match(r"yaml:3: cache\.options\.x: with its environment variables, the val")
    file.write_text("x:\n" + "- ${LONG}\n" * 100)
    refused(file, environment=environment).match(
        "yaml:[0-9]+: with expanded aliases and variables, there are more than"
    )


def test_the_nesting_depth_of_a_python_mapping_is_limited(tmp_path):
    values = {"x": 1}
    for _ in range(3000):
        values = {"x": values}
    refused({"cache": {"options": values}}).match("mappings are nested more than 100 deep")


LONG = "x" * 100_000


@pytest.mark.parametrize(
    "text",
    [
        f"? {LONG}\n: 1\n",
        f"server:\n  ? {LONG}\n  : 1\n",
        f"cache: {{page_size: {LONG}}}\n",
        f"model: {{dtype: {LONG}}}\n",
        f"x: ${{{LONG}}}\n",
        f"x: !{LONG} 1\n",
        f"x: *{LONG}\n",
        f"x: &{LONG} [\n",
        f"? [{LONG}]\n: 1\n",
        f"? 1{'0' * 900}\n: 1\n",
        f"{LONG}\n",
        f"server: {{kv_events: {LONG}}}\n",
    ],
)
def test_an_error_does_not_repeat_a_long_input(tmp_path, text):
    file = tmp_path / "engine.yaml"
    file.write_text(text)
    refused(file, environment={})


def test_the_list_of_many_problems_is_limited(tmp_path):
    file = tmp_path / "engine.yaml"
    file.write_text("".join(f"key{i}: 1\n" for i in range(2000)))
    caught = refused(file)
    assert len(str(caught.value).splitlines()) == 101
    caught.match("and 1,900 more lines")


@pytest.mark.parametrize("path", ["x" * 5000 + ".yaml", "a\0b.yaml"])
def test_an_impossible_path_is_refused(path):
    refused(path).match("cannot be read")


def test_a_configuration_within_the_limits_is_loaded(tmp_path):
    file = tmp_path / "engine.yaml"
    options = "".join(f"    key{i}: &a{i} {{x: [*a{i - 1}]}}\n" for i in range(1, 40))
    file.write_text(f"cache:\n  options:\n    key0: &a0 {{x: 1}}\n{options}")
    assert len(EngineConfig.load(file).cache.options) == 40
