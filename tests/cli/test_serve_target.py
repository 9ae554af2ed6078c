"""`graftlm serve FILE|MODEL`, and the options of other servers."""

import json
import re
import shutil
from pathlib import Path

import pytest

from graftlm.cli import main
from graftlm.cli.options import split_target
from graftlm.cli.other_options import other_options
from graftlm.config import EngineConfig, explain
from graftlm.demo import demo_checkpoint

#: Server and version -> the options of its command line.
OPTIONS_OF_SERVERS = json.loads((Path(__file__).parent / "options_of_other_servers.json").read_text())


def run(arguments, capsys):
    """Run a command line; return (exit status, output, errors)."""
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    out, err = capsys.readouterr()
    return ended.value.code, out, err


@pytest.mark.parametrize(
    ("target", "is_file"),
    [("engine.yaml", True), ("a/b.yml", True), ("demo", False), ("Qwen/Qwen3-8B", False), ("model.gguf", False)],
)
def test_a_target_is_a_configuration_or_a_model(target, is_file):
    file, model = split_target(target, None)
    assert (None if file is None else str(file), model) == ((target, None) if is_file else (None, target))


def test_an_existing_file_without_a_suffix_is_a_configuration(tmp_path):
    (tmp_path / "config").write_text("model: demo\n")
    assert split_target(str(tmp_path / "config"), None) == (tmp_path / "config", None)


def test_the_bundled_model_is_served_without_a_configuration_file(capsys):
    status, out, _ = run(["serve", "demo", "--dry-run"], capsys)
    assert status == 0
    assert "demo" in out


def test_a_model_folder_is_served_without_a_configuration_file(tmp_path, capsys):
    shutil.copytree(demo_checkpoint(), tmp_path / "mine")
    status, out, _ = run(["serve", str(tmp_path / "mine"), "--dry-run"], capsys)
    assert status == 0
    assert "mine" in out


def test_a_hub_model_is_found_in_the_local_cache(tmp_path, capsys, monkeypatch):
    snapshot = tmp_path / "models--someone--small" / "snapshots" / "0123"
    shutil.copytree(demo_checkpoint(), snapshot)
    refs = tmp_path / "models--someone--small" / "refs"
    refs.mkdir()
    (refs / "main").write_text("0123")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    status, out, err = run(["serve", "someone/small", "--dry-run"], capsys)
    assert status == 0, err
    assert "small" in out
    status, _, err = run(["serve", "someone/large", "--dry-run"], capsys)
    assert status == 2
    assert "hf download" in err


def test_two_models_are_refused(capsys):
    status, _, err = run(["serve", "demo", "--model", "other", "--dry-run"], capsys)
    assert status == 2
    assert "two models" in err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--max-model-len", "4096"], "the setting is model.context_len: --set model.context_len=VALUE"),
        (["--max-model-len=4096"], "--set model.context_len=VALUE"),
        (["--max_model_len", "4096"], "no option --max_model_len; the setting is model.context_len"),
        (["--compilation-config.mode", "3"], "execution.graphs and execution.graph_batch_sizes are the only settings"),
        (["--no-enable-prefix-caching"], "--set cache.name=chunk"),
        (["--chat-template", "x.jinja"], "--set chat.template=VALUE (a file with a Jinja template)"),
        (["--enable-auto-tool-choice"], "no option --enable-auto-tool-choice: tool choice `auto` is always available"),
        (["--tp", "2"], "parallel.tensor=VALUE"),
        (["-tp", "2"], "parallel.tensor=VALUE"),
        (["--pp", "2"], "the layers of a replica are split by parallel.tensor only"),
        (["--disable-overlap-schedule"], "--set scheduling.overlap=false"),
        (["--speculative-algorithm", "NGRAM"], "--set speculation.drafter=VALUE"),
        (["--speculative-draft-model-path", "x"], "the setting is speculation.drafter.options"),
    ],
)
def test_the_error_for_an_option_of_another_server_names_the_setting(arguments, says, capsys):
    status, _, err = run(["serve", "demo", *arguments, "--dry-run"], capsys)
    assert status == 2
    assert says in err


def test_all_options_of_other_servers_are_reported_together(capsys):
    names = [name for option in other_options() for name in option.names]
    assert len(names) == len(set(names))
    status, _, err = run(["serve", *names], capsys)
    assert status == 2
    assert all(f"no option {name}" in err for name in names)


@pytest.mark.parametrize("server", OPTIONS_OF_SERVERS)
def test_each_option_of_another_server_has_an_answer(server, capsys):
    own = {"-h", "--help", "--host", "--port", "--model", "--log-level"}
    names = [name for name in OPTIONS_OF_SERVERS[server] if name not in own]
    assert len(names) > 400
    _, _, err = run(["serve", *names], capsys)
    assert [name for name in names if f"graftlm serve has no option {name}" not in err] == []


def test_the_named_settings_exist():
    paths = {setting.path for setting in explain(EngineConfig())}
    paths |= {path.removesuffix(".name") for path in paths}  # the short form of a plugin section
    named = {option.setting.partition("=")[0] for option in other_options() if option.setting is not None}
    assert named - paths == set()


def test_an_option_of_no_server_is_refused(capsys):
    status, _, err = run(["serve", "--no-such-option"], capsys)
    assert status == 2
    assert "No such option" in err


def test_the_rows_of_the_docs_are_known_options():
    page = (Path(__file__).parents[2] / "docs" / "coming-from.md").read_text(encoding="utf-8")
    rows = set(re.findall(r"^\| (`-.*) \|$", page, re.MULTILINE))
    known = {
        f"{', '.join(f'`{name}`' for name in option.names)} | "
        f"{'none' if option.setting is None else f'`{option.setting}`'} | {option.note}"
        for option in other_options()
    }
    assert len(rows) > 40
    assert rows - known == set()


def test_the_metrics_that_the_docs_map_to_exist():
    page = (Path(__file__).parents[2] / "docs" / "coming-from.md").read_text(encoding="utf-8")
    reference = (Path(__file__).parents[2] / "docs" / "reference" / "metrics.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`(graftlm_\w+)`", page))
    assert len(named) > 8
    assert all(f"`{name}`" in reference for name in named)
