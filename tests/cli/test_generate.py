"""`graftlm generate` and `graftlm chat` from the command line."""

import io
import json
import re

import pytest

from graftlm import Engine, SamplingParams
from graftlm.cli import main
from graftlm.cli.options import names_target


def run(capsys, *arguments):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    captured = capsys.readouterr()
    return ended.value.code or 0, captured.out, captured.err


def completed(prompt, max_tokens):
    """Return the engine's completion of a prompt."""
    with Engine(model="demo") as engine:
        return engine.generate(prompt, SamplingParams(temperature=0, max_tokens=max_tokens))[0].text


def test_generate_completes_each_prompt(capsys):
    prompt = "The capital of Japan is"
    # computed before the command, because a first start reports the kernels that it compiles
    expected = completed(prompt, 4)
    code, out, err = run(capsys, "generate", prompt, prompt, "--temperature", "0", "--max-tokens", "4")
    assert (code, err) == (0, "")
    assert out == 2 * f"{expected}\n"


def test_generate_takes_chats_and_prints_json(capsys):
    question = "What is the capital of France?"
    code, out, _ = run(capsys, "generate", "--chat", question, question, "--temperature", "0", "--json")
    answers = [json.loads(line) for line in out.splitlines()]
    assert code == 0
    assert [a["completions"][0]["text"] for a in answers] == ["The capital of France is Paris."] * 2
    assert answers[0]["completions"][0]["finish_reason"] == "stop"
    assert answers[1]["usage"]["cached_tokens"] > 0


def test_generate_reads_a_prompt_from_standard_input(capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("The capital of Peru is"))
    code, out, _ = run(capsys, "generate", "-", "--temperature", "0", "--max-tokens", "3")
    assert code == 0
    assert out == f"{completed('The capital of Peru is', 3)}\n"


def test_generate_with_a_seed_is_reproducible(capsys):
    arguments = ["generate", "Once", "--seed", "5", "-n", "2", "--max-tokens", "8", "--stop", "qqq"]
    first, second = run(capsys, *arguments), run(capsys, *arguments)
    assert first == second
    assert "\n---\n" in first[1]


@pytest.mark.parametrize(
    ("arguments", "command"),
    [
        (["demo", "hi there"], "graftlm generate --model demo 'hi there'"),
        (["demo"], "graftlm generate --model demo PROMPT"),
        (["folder", "a"], "graftlm generate --model folder a"),
        (["engine.yaml", "a"], "graftlm generate --config engine.yaml a"),
    ],
)
def test_a_model_in_the_place_of_a_prompt_is_refused(capsys, tmp_path, monkeypatch, arguments, command):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "config.json").write_text("{}")
    (tmp_path / "engine.yaml").write_text("model: demo\n")
    code, _, err = run(capsys, "generate", *arguments)
    assert code == 2
    assert err.startswith(f"error: '{arguments[0]}' is a ")
    assert err.endswith(f"; use: {command}\n")


@pytest.mark.parametrize("prompt", ["x" * 5000, "a\0b", "no/such", "The end.yaml", "~nobody-of-that-name/x", " "])
def test_other_texts_are_prompts(prompt):
    assert not names_target(prompt)


@pytest.mark.parametrize("arguments", [["demo"], ["engine.yaml"], ["--model", "demo"]])
def test_chat_takes_the_target_of_serve(capsys, tmp_path, monkeypatch, arguments):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "engine.yaml").write_text("model: demo\n")
    monkeypatch.setattr("sys.stdin", io.StringIO("What is 2 plus 3?\n"))
    code, out, _ = run(capsys, "chat", *arguments)
    assert (code, out) == (0, "2 + 3 = 5.\n")


def test_chat_refuses_two_configurations(capsys):
    code, _, err = run(capsys, "chat", "a.yaml", "--config", "b.yaml")
    assert (code, err) == (2, "error: two configurations are given: a.yaml and --config b.yaml\n")


def test_generate_takes_a_configuration_file_and_overrides(capsys, tmp_path):
    file = tmp_path / "engine.yaml"
    file.write_text("model: demo\ncache: {name: chunk}\n")
    code, out, _ = run(
        capsys, "generate", "--config", str(file), "--set", "cache.page_size=16", "--max-tokens", "2", "a", "--json"
    )
    assert code == 0
    assert json.loads(out)["usage"]["cached_tokens"] == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["a", "--model", "no/such/model"], "error: .*no/such/model"),
        (["a", "--temperature", "-1"], "error: temperature must be between 0 and 100"),
        (["a", "--set", "cache=radixx"], "error: Unknown prefix cache 'radixx'"),
        (["a", "--set", "cach.name=radix"], "error: .*cach"),
        (["", "--set", "model.context_len=1"], "error: the prompt"),
    ],
)
def test_an_error_is_one_line_with_exit_status_2(capsys, arguments, message):
    code, out, err = run(capsys, "generate", *arguments)
    assert (code, out) == (2, "")
    assert re.search(message, err)
    assert "Traceback" not in err


def test_chat_sends_and_reuses_earlier_turns(capsys, monkeypatch):
    lines = "What is the capital of Peru?\n\nWhat is 3 + 4?\n/reset\nWhat is the capital of Peru?\n/exit\nnot read\n"
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    code, out, err = run(capsys, "chat", "--system", "Be brief.")
    assert code == 0
    answers = out.splitlines()
    assert answers[0] == answers[2] == "The capital of Peru is Lima."
    assert len(answers) == 3
    reports = err.splitlines()
    assert len(reports) == 3
    assert " 0 of them cached" in reports[0]
    assert " 0 of them cached" not in reports[1]


def test_chat_continues_after_a_refused_request(capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO(f"/help\n{'x ' * 300}\nWhat is 3 + 4?\n"))
    code, out, err = run(capsys, "chat", "--set", "model.context_len=64")
    assert code == 0
    assert "error: unknown command /help; use /image FILE for a picture, /reset for a new conversation" in err
    assert "error: this model's maximum context length" in err
    assert out.splitlines() == ["3 + 4 = 7."]


@pytest.mark.full
def test_chat_takes_pictures(capsys, monkeypatch, tmp_path):
    from PIL import Image

    from graftlm.testing.tiny_media import random_picture, write_media_checkpoint

    path = write_media_checkpoint(tmp_path / "llava", "llava")
    file = tmp_path / "a picture.png"
    Image.fromarray(random_picture(20, 20)).save(file)
    lines = f"/image {file}\nWhat?\nAnd now?\n/image missing.png\nWhat?\n/reset\n/image '{file}'\nWhat?\n"
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    settings = ("--set", "memory.kv_tokens=1024", "--max-tokens", "4")
    code, _, err = run(capsys, "chat", "--model", str(path), *settings)
    assert code == 0
    reports = [int(number) for number in re.findall(r"\[(\d+) prompt tokens", err)]
    assert len(reports) == 3
    assert reports[0] == reports[2] < reports[1]
    assert reports[0] > 16
    assert "missing.png" in err
