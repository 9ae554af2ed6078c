"""Any content of a checkpoint's JSON files, and any file name in them, raises only typed errors."""

import json
import os
import shutil
from pathlib import Path

import pytest

from graftlm import Engine
from graftlm.checkpoint import load_model_config, resolve_checkpoint
from graftlm.checkpoint.json_files import read_json
from graftlm.checkpoint.safetensors_files import SafetensorsFiles
from graftlm.errors import AdapterError, CheckpointError, GraftlmError
from graftlm.lora.peft_adapter import read_peft_adapter
from graftlm.pooling.sentence_embedding import read_embedding_defaults

#: Texts that are not the name of a file in the same folder.
STRANGE_NAMES = [
    "", ".", "..", "../x", "a/b", "/etc/passwd", "a\0b", "..\\x", "x" * 256, "x" * 100_000, "ä" * 128, "\ud800",
    None, 1, ["x"], {"a": "b"},
]  # fmt: skip

STRANGE_JSON = {
    "deep lists": "[" * 100_000 + "]" * 100_000,
    "deep objects": '{"a":' * 100_000 + "1" + "}" * 100_000,
    "an open list": "[" * 100_000,
    "a long number": f'{{"a": {"1" * 100_000}}}',
    "bytes": b"\xff\xfe",
    "nothing": "",
    "a list": "[]",
    "a text": f'"{"x" * 100_000}"',
}


def refusal(function, *arguments, error=CheckpointError):
    """Return the message with which a call is refused; it is short for any input."""
    with pytest.raises(error) as caught:
        function(*arguments)
    assert len(str(caught.value)) < 3000
    return str(caught.value)


@pytest.mark.parametrize("name", STRANGE_NAMES)
def test_a_shard_outside_the_folder_is_refused(tmp_path, name):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": name}}))
    message = refusal(SafetensorsFiles, tmp_path)
    assert "model.safetensors.index.json: 'w': expected the name of a file in the same folder, got " in message


def test_a_shard_that_is_a_folder_is_refused(tmp_path):
    (tmp_path / "shard").mkdir()
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"w": "shard"}}')
    assert "lacks shard, which model.safetensors.index.json lists" in refusal(SafetensorsFiles, tmp_path)


def test_the_message_about_many_missing_shards_is_short(tmp_path):
    weight_map = {f"w{i}": f"shard-{i:06}" for i in range(50_000)}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert "and 49,988 more, which" in refusal(SafetensorsFiles, tmp_path)


def test_the_message_about_many_missing_gguf_parts_is_short(tmp_path):
    from graftlm.checkpoint import checkpoint_files

    file = tmp_path / "model-00001-of-99999.gguf"
    file.write_bytes(b"GGUF")
    assert "and 99,986 more, which are parts of" in refusal(checkpoint_files, file)


@pytest.mark.parametrize("name", [name for name in STRANGE_NAMES if name])
def test_a_pooling_module_outside_the_folder_is_refused(tmp_path, name):
    module = {"type": "sentence_transformers.models.Pooling", "path": name}
    (tmp_path / "modules.json").write_text(json.dumps([module]))
    message = refusal(read_embedding_defaults, tmp_path)
    assert "modules.json: path: expected the name of a file in the same folder, got " in message


@pytest.mark.parametrize("content", STRANGE_JSON.values(), ids=list(STRANGE_JSON))
@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("config.json", load_model_config),
        ("generation_config.json", load_model_config),
        ("quantize_config.json", load_model_config),
        ("model.safetensors.index.json", SafetensorsFiles),
        ("modules.json", read_embedding_defaults),
    ],
)
def test_malformed_content_is_a_checkpoint_error(tmp_path, name, read, content):
    config = {"architectures": ["LlamaForCausalLM"], "vocab_size": 8, "max_position_embeddings": 8}
    (tmp_path / "config.json").write_text(json.dumps(config))
    if name == "modules.json" and content == "[]":
        content = "{}"  # modules.json contains a list, so [] is valid in it
    file = tmp_path / name
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert name in refusal(read, tmp_path)


@pytest.mark.parametrize("content", STRANGE_JSON.values(), ids=list(STRANGE_JSON))
def test_malformed_content_of_an_adapter_is_an_adapter_error(tmp_path, content):
    import torch

    (tmp_path / "adapter_config.json").write_bytes(content if isinstance(content, bytes) else content.encode())
    refusal(read_peft_adapter, tmp_path, {}, 8, torch.float32, error=AdapterError)


@pytest.mark.parametrize("content", STRANGE_JSON.values(), ids=list(STRANGE_JSON))
@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_malformed_content_of_a_tokenizer_is_a_checkpoint_error(checkpoint, tmp_path, name, content):
    from graftlm.tokenization import Tokenizer

    folder = tmp_path / "copy"
    shutil.copytree(checkpoint("llama"), folder)
    (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    refusal(Tokenizer.load, folder)


def test_a_pipe_is_not_read(tmp_path):
    os.mkfifo(tmp_path / "config.json")
    assert "is not a regular file" in refusal(read_json, tmp_path / "config.json")


def test_a_file_beyond_the_size_limit_is_not_read(tmp_path):
    with (tmp_path / "config.json").open("wb") as file:
        file.truncate(1 << 40)
    assert "has 1,099,511,627,776 bytes, expected at most 268,435,456" in refusal(read_json, tmp_path / "config.json")


@pytest.mark.parametrize("path", ["x" * 5000, "/".join("x" * 5000), "a\0b", "~nobody-of-this-name/x"])
def test_an_impossible_path_is_refused(path):
    import torch

    refusal(resolve_checkpoint, path)
    refusal(read_peft_adapter, Path(path), {}, 8, torch.float32, error=AdapterError)


@pytest.mark.parametrize(
    "changes",
    [
        {"max_position_embeddings": 10**30},
        {"max_position_embeddings": 10**4000},
        {"vocab_size": 10**30},
        {"num_hidden_layers": 10**30},
        {"num_attention_heads": 10**30},
        {"head_dim": 10**12},
        {"rope_theta": float("inf"), "rope_parameters": None},
        {"rope_parameters": {"rope_type": "default", "rope_theta": float("nan")}},
        {"rms_norm_eps": 10**400},
        {"eos_token_id": 10**30},
        {"eos_token_id": [10**4000]},
    ],
)
def test_unusual_numbers_are_served_or_raise_typed_errors(checkpoint, tmp_path, changes):
    folder = tmp_path / "copy"
    shutil.copytree(checkpoint("llama"), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    try:
        with Engine(model=str(folder), memory={"kv_tokens": 64}) as engine:
            engine.generate([1], {"max_tokens": 1})
    except GraftlmError as error:
        assert len(str(error)) < 3000  # noqa: PT017  # served or refused: both are right
