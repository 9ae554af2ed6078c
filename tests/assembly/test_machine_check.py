"""`graftlm config check` and `serve --dry-run` report what is missing on this machine, with file and line."""

import json
import os
import socket

import pytest

from graftlm.cli import main
from graftlm.registry import probe_platform
from graftlm.testing.tiny_models import write_tiny_checkpoint


@pytest.fixture
def run(capsys, tmp_path, monkeypatch):
    """Run a command on a file with this text; return (exit status, stdout, lines of stderr)."""
    monkeypatch.chdir(tmp_path)

    def command(text, *arguments):
        (tmp_path / "engine.yaml").write_text(text)
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        captured = capsys.readouterr()
        return ended.value.code or 0, captured.out, captured.err.splitlines()

    return command


CHECK = ("config", "check", "engine.yaml")
STORAGE = "cache:\n  name: hicache\n  options:\n    storage:\n      name: file\n      options:\n"

LACKS = {
    "model": ("model:\n  path: no/model\n", "2: model.path: No checkpoint at 'no/model'"),
    "empty model": ("model:\n  path: .\n", "2: model.path: No checkpoint in .: looked for config.json"),
    "long path": (f"model:\n  path: {'x' * 5000}\n", "2: model.path: model.path 'xxx"),
    "context": (
        "model:\n  context_len: 1000000\n",
        "2: model.context_len: is 1,000,000, but the context of demo has only",
    ),
    "draft model": (
        "speculation:\n  drafter: {name: draft_model, options: {path: no/draft}}\n",
        "2: speculation.drafter.options.path: the draft model cannot be used: No checkpoint at 'no/draft'",
    ),
    "chat template": ("chat:\n  template: no.jinja\n", "2: chat.template: cannot read no.jinja: No such file"),
    "adapter": ("lora:\n  adapters:\n    a: no/adapter\n", "3: lora.adapters.a: no/adapter/adapter_config.json cannot"),
    "storage path": (f"{STORAGE}        path: engine.yaml\n", "7: cache.options.storage.options.path: "),
    "storage size": (
        f"{STORAGE}        path: kv\n        max_bytes: 100000TiB\n",
        "8: cache.options.storage.options.max_bytes: is ",
    ),
    "host memory": (
        "cache:\n  name: hicache\n  options:\n    host_gib: 1000000000\n",
        "4: cache.options.host_gib: is 1e+09, but this machine has ",
    ),
}


@pytest.mark.parametrize("name", LACKS)
def test_a_missing_part_of_the_machine_is_an_error_with_its_line(run, name):
    text, message = LACKS[name]
    status, out, err = run(text, *CHECK)
    assert (status, out, len(err)) == (2, "", 1)
    assert err[0].startswith(f"error: engine.yaml:{message}")
    assert run(text, *CHECK, "--elsewhere") == (0, "OK\n", [])
    assert run(text, "serve", "--dry-run", "engine.yaml")[0] == 2


def test_a_draft_model_of_another_vocabulary_is_an_error(run, tmp_path):
    write_tiny_checkpoint(tmp_path / "draft", vocab_size=384)
    text = "speculation:\n  drafter:\n    name: draft_model\n    options:\n      path: draft\n"
    for arguments in (CHECK, ("serve", "--dry-run", "engine.yaml")):
        status, _, err = run(text, *arguments)
        assert status == 2
        assert err[-1].startswith(
            "error: engine.yaml:5: speculation.drafter.options.path: the draft model cannot be used: draft has a vocab"
        ), err


@pytest.mark.skipif(probe_platform().device == "cuda", reason="needs a machine without CUDA")
def test_a_missing_cuda_device_is_an_error(run):
    text = "attention: auto\nmodel:\n  device: cuda\n"
    status, _, err = run(text, *CHECK)
    assert status == 2
    assert "error: engine.yaml:3: model.device: is 'cuda', but this machine has no CUDA device" in "\n".join(err)
    assert run(text, *CHECK, "--elsewhere")[:2] == (0, "OK\n")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_storage_folder_that_is_not_writable_is_an_error(run, tmp_path):
    (tmp_path / "locked").mkdir(mode=0o500)
    _, _, err = run(f"{STORAGE}        path: locked/kv\n", *CHECK)
    assert err[0].endswith("locked cannot be written")


def test_all_missing_parts_are_listed_in_order_of_lines(run):
    text = "lora:\n  adapters: {a: no/a, b: no/b}\nmodel:\n  path: no/model\n"
    status, _, err = run(text, *CHECK)
    assert status == 2
    assert [line.split(":")[2] for line in err] == ["2", "2", "4"]


def write_adapter(folder, **entries):
    folder.mkdir()
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 8} | entries
    (folder / "adapter_config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("entries", "message"),
    [({"r": 128}, "has rank 128, above lora.max_rank 64"), ({}, "does not contain adapter_model.safetens")],
)
def test_the_contents_of_an_adapter_are_checked(run, tmp_path, entries, message):
    write_adapter(tmp_path / "adapter", **entries)
    _, _, err = run("lora: {adapters: {a: adapter}}\n", *CHECK)
    assert any(message in line for line in err)


def test_a_rank_that_no_module_uses_is_not_an_error(run, tmp_path):
    write_adapter(tmp_path / "adapter", r=128, rank_pattern={"q_proj": 8})
    (tmp_path / "adapter" / "adapter_model.safetensors").write_bytes(b"")
    assert run("lora: {adapters: {a: adapter}}\n", *CHECK) == (0, "OK\n", [])


def test_a_dry_run_prints_the_plan_and_leaves_the_port_free(run):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    text = f"cache: chunk\nserver:\n  port: {port}\n"
    status, out, err = run(text, "serve", "engine.yaml", "--dry-run")
    assert (status, err) == (0, [])
    assert "(LlamaForCausalLM), 0.01 GiB of weights, float32 on " in out
    assert "KV memory: 131,072 tokens of 2,560 bytes; the weights leave about " in out
    assert "plugin: cache = chunk of graftlm" in out
    assert "(cache.name: engine.yaml:1)" in out
    assert f"address: http://127.0.0.1:{port} is free" in out
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        listener.listen()
        status, _, err = run(text, "serve", "engine.yaml", "--dry-run")
    assert status == 2
    assert err == [f"error: cannot listen on 127.0.0.1:{port}: Address already in use. Set server.host or server.port."]


def test_a_dry_run_refuses_memory_above_the_machines_total(run):
    text = "server: {port: 0}\nmemory:\n  kv_tokens: 900000000000\n"
    status, _, err = run(text, "serve", "engine.yaml", "--dry-run")
    assert status == 2
    assert err[0].startswith("error: engine.yaml:3: memory.kv_tokens: 900,000,000,000 tokens need ")
