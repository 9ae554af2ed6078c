import json
from pathlib import Path
from typing import Any

import pytest

from graftlm.checkpoint import resolve_checkpoint
from graftlm.demo import demo_checkpoint
from graftlm.errors import CheckpointError

CONFIG = {"architectures": ["LlamaForCausalLM"], "vocab_size": 100, "max_position_embeddings": 64}


def write_json(file: Path, value: Any) -> None:
    file.write_text(json.dumps(value))


class TestResolve:
    def test_a_folder_with_a_config_is_returned_unchanged(self, tmp_path: Path) -> None:
        write_json(tmp_path / "config.json", CONFIG)
        assert resolve_checkpoint(str(tmp_path)) == tmp_path

    def test_demo_is_the_bundled_model_or_reported_as_missing(self) -> None:
        if (demo_checkpoint() / "config.json").exists():
            assert resolve_checkpoint("demo") == demo_checkpoint()
        else:
            with pytest.raises(CheckpointError, match="demo"):
                resolve_checkpoint("demo")

    def test_a_gguf_file_is_returned_unchanged(self, tmp_path: Path) -> None:
        file = tmp_path / "model.gguf"
        file.touch()
        assert resolve_checkpoint(str(file)) == file

    def test_another_file_is_refused(self, tmp_path: Path) -> None:
        file = tmp_path / "model.safetensors"
        file.touch()
        with pytest.raises(CheckpointError, match=r"is a file, but not a .gguf file"):
            resolve_checkpoint(str(file))

    def test_the_error_for_a_folder_of_gguf_files_asks_for_a_file(self, tmp_path: Path) -> None:
        (tmp_path / "model.gguf").touch()
        with pytest.raises(CheckpointError, match=r"set model.path to the file: .*model.gguf"):
            resolve_checkpoint(str(tmp_path))

    def test_a_missing_folder_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(CheckpointError, match=r"org/model.*looked for the folder.*download"):
            resolve_checkpoint(str(tmp_path / "org/model"))

    def test_the_error_for_a_folder_without_config_lists_its_files(self, tmp_path: Path) -> None:
        (tmp_path / "notes.txt").touch()
        with pytest.raises(CheckpointError, match=r"looked for config.json, found notes.txt"):
            resolve_checkpoint(str(tmp_path))
