"""`graftlm serve FILE|MODEL`, and the options of other servers."""

import re
import shutil
from pathlib import Path

import pytest

from graftlm.cli import main
from graftlm.cli.options import split_target
from graftlm.cli.other_options import OTHER_OPTIONS
from graftlm.config import EngineConfig, explain
from graftlm.demo import demo_checkpoint


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
        (["--tp", "2"], "one replica runs on one device"),
        (["-tp", "2"], "one replica runs on one device"),
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
    names = [name for option in OTHER_OPTIONS for name in option.names]
    assert len(names) == len(set(names))
    status, _, err = run(["serve", *names], capsys)
    assert status == 2
    assert all(f"no option {name}" in err for name in names)


def test_the_named_settings_exist():
    paths = {setting.path for setting in explain(EngineConfig())}
    paths |= {path.removesuffix(".name") for path in paths}  # the short form of a plugin section
    named = {option.setting.partition("=")[0] for option in OTHER_OPTIONS if option.setting is not None}
    assert named - paths == set()


def test_an_option_of_no_server_is_refused(capsys):
    status, _, err = run(["serve", "--no-such-option"], capsys)
    assert status == 2
    assert "No such option" in err


def test_the_docs_have_a_row_for_each_known_option():
    page = (Path(__file__).parents[2] / "docs" / "coming-from.md").read_text(encoding="utf-8")
    for option in OTHER_OPTIONS:
        names = ", ".join(f"`{name}`" for name in option.names)
        setting = "not available" if option.setting is None else f"`{option.setting}`"
        assert f"| {names} | {setting} | {option.note} |" in page


def test_the_metrics_that_the_docs_map_to_exist():
    page = (Path(__file__).parents[2] / "docs" / "coming-from.md").read_text(encoding="utf-8")
    reference = (Path(__file__).parents[2] / "docs" / "reference" / "metrics.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`(graftlm_\w+)`", page))
    assert len(named) > 8
    assert all(f"`{name}`" in reference for name in named)
