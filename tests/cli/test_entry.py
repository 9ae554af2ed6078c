"""The command line: `graftlm config`, `graftlm plugins`, error messages, and imports."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from graftlm import __version__
from graftlm.cli import main
from graftlm.config import EngineConfig

PLUGIN = """
from graftlm import Options, Provider, hookimpl

class WeightOptions(Options):
    weight: float = 1.0

def needs_cuda(platform):
    return None if platform.device == "cuda" else "needs a CUDA device"

def create(options, context):
    return None

@hookimpl
def provide_eviction_strategies():
    return [
        Provider(name="tidy", summary="x", api_version=1, create=create, options=WeightOptions),
        Provider(name="fancy", summary="x", api_version=1, create=create, unavailable=needs_cuda),
    ]
"""


@pytest.fixture
def workplace(tmp_path, monkeypatch):
    """A working directory with an installed plugin, another plugin that fails to load, and a configuration that
    uses neither.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    for name, source in (("cli-tidy", PLUGIN), ("cli-broken", "import no_such_module_here")):
        module = name.replace("-", "_")
        Path(f"{module}.py").write_text(source)
        info = Path(f"{module}-1.5.dist-info")
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.5\n")
        (info / "entry_points.txt").write_text(f"[graftlm]\n{module} = {module}\n")
    Path("engine.yaml").write_text("cache:\n  page_size: 16\n  eviction: tidy\n")
    yield tmp_path
    sys.modules.pop("cli_tidy", None)


@pytest.fixture
def graftlm(workplace, capsys):
    """Run the command; return (exit status, stdout, stderr)."""

    def run(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        out, err = capsys.readouterr()
        return int(caught.value.code or 0), out, err

    return run


def test_version(graftlm):
    assert graftlm("--version") == (0, f"graftlm {__version__}\n", "")


@pytest.mark.parametrize("arguments", [("--help",), ("config", "--help"), ("plugins", "--help")])
def test_help_names_the_commands(graftlm, arguments):
    status, out, err = graftlm(*arguments)
    assert (status, err) == (0, "")
    assert "Usage: " in out


@pytest.mark.parametrize("arguments", [("conifg",), ("config", "check"), ("plugins", "--nope")])
def test_wrong_arguments_exit_with_2(graftlm, arguments):
    status, out, err = graftlm(*arguments)
    assert (status, out) == (2, "")
    assert "Usage: " in err


def test_config_show_prints_yaml_with_the_same_meaning(graftlm):
    config = EngineConfig.load("engine.yaml", ["cache.options={a: {b: [1, 'x: y']}, 'c d': '2'}", "model.path=a #b"])
    overrides = ["--set", "cache.options={a: {b: [1, 'x: y']}, 'c d': '2'}", "--set", "model.path='a #b'"]
    status, out, err = graftlm("config", "show", "engine.yaml", *overrides)
    assert (status, err) == (0, "")
    assert EngineConfig.load(yaml.safe_load(out)) == EngineConfig.load(config, ["model.path='a #b'"])


def test_config_show_prints_the_source_of_every_value(graftlm):
    _, out, _ = graftlm("config", "show", "engine.yaml", "--set", "server.port=80", "--set", "server.api_key=s3cret")
    found = [tuple(part.strip() for part in line.split(" # ")) for line in out.splitlines() if " # " in line]
    assert len(found) == len(EngineConfig().sources)
    expected = [("page_size: 16", "engine.yaml:2"), ("name: tidy", "engine.yaml:3"), ("port: 80", "--set")]
    assert {*expected, ("debug: false", "default")} <= set(found)
    assert "s3cret" not in out


def test_config_check_accepts_a_correct_configuration(graftlm):
    status, out, err = graftlm("config", "check", "engine.yaml")
    assert (status, out) == (0, "OK\n")
    assert "error" not in err.replace("ModuleNotFoundError", "")


def test_config_check_refuses_a_configuration_whose_plugins_are_disabled(graftlm):
    status, out, err = graftlm("config", "check", "engine.yaml", "--set", "plugins.disabled=[cli-tidy]")
    assert (status, out) == (2, "")
    assert "error: engine.yaml:3: cache.eviction.name: Unknown eviction strategy 'tidy'." in err


def test_config_check_lists_every_error_and_exits_with_2(graftlm):
    Path("engine.yaml").write_text("cache:\n  page_siz: 16\nserver: {port: x}\n")
    assert graftlm("config", "check", "engine.yaml") == (
        2,
        "",
        "error: engine.yaml:2: cache.page_siz: unknown key; did you mean 'page_size'?\n"
        "error: engine.yaml:3: server.port: must be a whole number, got 'x'\n",
    )


def test_config_check_lists_unknown_keys_plugins_and_options_together(graftlm):
    Path("engine.yaml").write_text("cache: {page_siz: 16, name: nonesuch}\ngrammar: {options: {nope: 1}}\n")
    status, _, err = graftlm("config", "check", "engine.yaml")
    assert status == 2
    for problem in (
        "cache.page_siz: unknown key",
        "cache.name: Unknown prefix cache 'nonesuch'",
        "grammar.options.nope",
    ):
        assert problem in err


def test_config_check_checks_the_fallbacks_of_a_grammar_backend(graftlm):
    Path("engine.yaml").write_text("grammar: {name: xgrammar, options: {fallback: [llguidanec]}}\n")
    status, out, err = graftlm("config", "check", "engine.yaml")
    assert (status, out) == (2, "")
    assert "error: engine.yaml:1: grammar.options.fallback: Unknown grammar backend 'llguidanec'." in err


@pytest.mark.parametrize(
    ("name", "fallback"), [("xgrammar", "xgrammar"), ("auto", "xgrammar"), ("outlines", "outlines")]
)
def test_a_grammar_backend_that_is_its_own_fallback_is_an_error(graftlm, name, fallback):
    Path("engine.yaml").write_text(f"grammar: {{name: {name}, options: {{fallback: [{fallback}]}}}}\n")
    status, _, err = graftlm("config", "check", "engine.yaml")
    assert status == 2
    assert f"error: engine.yaml:1: grammar.options.fallback: {fallback} cannot fall back to itself" in err


def test_config_check_checks_the_storage_of_a_cache(graftlm):
    text = "cache: {name: hicache, options: {storage: {name: fil, options: {pth: /x}}}}\n"
    Path("engine.yaml").write_text(text)
    status, out, err = graftlm("config", "check", "engine.yaml")
    assert (status, out) == (2, "")
    assert "error: engine.yaml:1: cache.options.storage.name: Unknown KV storage 'fil'." in err
    Path("engine.yaml").write_text(text.replace("fil,", "file,"))
    _, _, err = graftlm("config", "check", "engine.yaml")
    assert "error: engine.yaml:1: cache.options.storage.options.pth: unknown key; did you mean 'path'?" in err


def test_config_check_looks_up_names_and_options(graftlm):
    Path("engine.yaml").write_text("cache:\n  eviction:\n    name: tidy\n    options: {wieght: 1}\ngrammar: gbnf2\n")
    status, out, err = graftlm("config", "check", "engine.yaml")
    assert (status, out) == (2, "")
    assert "error: engine.yaml:4: cache.eviction.options.wieght: unknown key; did you mean 'weight'?\n" in err
    assert "error: engine.yaml:5: grammar.name: Unknown grammar backend 'gbnf2'." in err
    assert "warning: plugin 'cli_broken' (dist cli-broken 1.5) failed to load: ModuleNotFoundError: " in err


def test_errors_are_lines_without_a_traceback(graftlm):
    assert graftlm("config", "show", "gone.yaml") == (2, "", "error: gone.yaml: no such file\n")
    assert graftlm("config", "show", "engine.yaml", "--set", "debug") == (
        2,
        "",
        "error: --set 'debug': must be path=value, such as cache.page_size=16\n",
    )


def test_schema_is_json_with_the_installed_plugins(graftlm):
    status, out, err = graftlm("config", "schema")
    schema = json.loads(out)
    assert (status, err) == (0, "")
    assert schema["$defs"]["eviction.tidy"]["properties"]["weight"]["anyOf"][0] == {"type": "number"}


def test_plugins_prints_a_table_with_reasons_and_load_failures(graftlm):
    status, out, err = graftlm("plugins", "--device", "cpu")
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert (status, err) == (0, "")
    assert lines[0] == "family name distribution version available"
    assert "eviction tidy cli-tidy 1.5 yes" in lines
    assert "eviction fancy cli-tidy 1.5 no: needs a CUDA device" in lines
    assert lines[-1] == (
        "failed: plugin 'cli_broken' (dist cli-broken 1.5) failed to load: "
        "ModuleNotFoundError: No module named 'no_such_module_here'"
    )


def test_plugins_prints_json(graftlm):
    status, out, err = graftlm("plugins", "--json", "--device", "cpu", "--set", "plugins.disabled=[graftlm]")
    found = json.loads(out)
    assert (status, err) == (0, "")
    assert found["providers"][0] == {
        "family": "eviction",
        "name": "fancy",
        "summary": "x",
        "plugin": "cli_tidy",
        "distribution": "cli-tidy",
        "version": "1.5",
        "unavailable": "needs a CUDA device",
    }
    assert [failure["plugin"] for failure in found["failures"]] == ["cli_broken"]


def test_plugins_uses_the_plugins_section_of_a_configuration(graftlm):
    Path("engine.yaml").write_text("plugins: {disabled: [graftlm, cli-tidy, cli-broken]}\n")
    assert json.loads(graftlm("plugins", "--json", "--config", "engine.yaml")[1]) == {
        "providers": [],
        "observers": [],
        "failures": [],
    }


@pytest.mark.parametrize(
    ("arguments", "heavy"),
    [
        (["--help"], {"torch", "transformers", "numpy", "pydantic", "rich", "yaml"}),
        (["plugins"], {"torch", "transformers"}),
        (["plugins", "--json"], {"torch", "transformers", "rich"}),
        (["config", "check", "engine.yaml"], {"torch", "transformers", "rich"}),
        (["config", "schema"], {"torch", "transformers", "rich"}),
    ],
)
def test_a_command_imports_no_heavy_module(workplace, arguments, heavy):
    script = "\n".join(
        [
            "import sys",
            "from graftlm.cli import main",
            "try:",
            f"    main({arguments!r})",
            "except SystemExit:",
            f"    print(sorted({heavy!r} & set(sys.modules)), file=sys.stderr)",
        ]
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert done.stderr.splitlines()[-1] == "[]"


def test_the_console_command_is_installed(workplace):
    command = Path(sys.executable).with_name("graftlm")
    done = subprocess.run([command, "--version"], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (0, f"graftlm {__version__}\n")
