import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from graftlm.checkpoint import iter_weights
from graftlm.errors import CheckpointError


def write_json(file: Path, value: Any) -> None:
    file.write_text(json.dumps(value))


def write_shards(folder: Path) -> dict[str, torch.Tensor]:
    tensors = {name: torch.randn(3, 2) for name in "abc"}
    save_file({"a": tensors["a"], "c": tensors["c"]}, folder / "one.safetensors")
    save_file({"b": tensors["b"]}, folder / "two.safetensors")
    weight_map = {"a": "one.safetensors", "b": "two.safetensors", "c": "one.safetensors"}
    write_json(folder / "model.safetensors.index.json", {"weight_map": weight_map})
    return tensors


class TestWeights:
    def test_one_file_gives_all_its_tensors(self, tmp_path: Path) -> None:
        tensors = {"a": torch.randn(2, 3), "b": torch.randn(4).bfloat16()}
        save_file(tensors, tmp_path / "model.safetensors")
        got = dict(iter_weights(tmp_path))
        assert got.keys() == tensors.keys()
        assert all(torch.equal(got[name], tensor) for name, tensor in tensors.items())
        assert got["b"].dtype == torch.bfloat16

    def test_shards_give_every_tensor_once(self, tmp_path: Path) -> None:
        tensors = write_shards(tmp_path)
        got = list(iter_weights(tmp_path))
        assert sorted(name for name, _ in got) == ["a", "b", "c"]
        assert all(torch.equal(tensor, tensors[name]) for name, tensor in got)

    def test_a_tensor_is_read_when_the_iteration_reaches_it(self, tmp_path: Path) -> None:
        write_shards(tmp_path)
        weights = iter_weights(tmp_path)
        assert next(weights)[0] == "a"
        (tmp_path / "two.safetensors").write_bytes(b"not yet looked at")
        assert next(weights)[0] == "c"
        with pytest.raises(CheckpointError, match=r"two.safetensors"):
            next(weights)

    def test_a_missing_shard_is_named_before_anything_is_read(self, tmp_path: Path) -> None:
        write_shards(tmp_path)
        (tmp_path / "two.safetensors").unlink()
        with pytest.raises(CheckpointError, match=r"lacks two.safetensors"):
            iter_weights(tmp_path)

    @pytest.mark.parametrize("keep_bytes", [0, 4, 40, -8])
    def test_a_truncated_file_is_named(self, keep_bytes: int, tmp_path: Path) -> None:
        file = tmp_path / "model.safetensors"
        save_file({"a": torch.randn(64, 64)}, file)
        file.write_bytes(file.read_bytes()[:keep_bytes])
        with pytest.raises(CheckpointError, match=r"model.safetensors is truncated"):
            list(iter_weights(tmp_path))

    def test_an_index_that_names_an_absent_tensor_is_refused(self, tmp_path: Path) -> None:
        write_shards(tmp_path)
        save_file({"x": torch.zeros(1)}, tmp_path / "two.safetensors")
        with pytest.raises(CheckpointError, match=r"two.safetensors lacks the tensor 'b'"):
            list(iter_weights(tmp_path))

    @pytest.mark.parametrize("weight_map", [None, {}, {"a": "../one.safetensors"}, {"a": 3}])
    def test_a_bad_index_is_refused(self, weight_map: Any, tmp_path: Path) -> None:
        write_json(tmp_path / "model.safetensors.index.json", {"weight_map": weight_map})
        with pytest.raises(CheckpointError, match=r"index.json"):
            iter_weights(tmp_path)

    @pytest.mark.parametrize(
        ("files", "message"),
        [
            ((), "found nothing"),
            (("pytorch_model.bin",), "pickled weights"),
            (("consolidated.safetensors",), "found consolidated.safetensors"),
        ],
    )
    def test_the_error_for_a_folder_without_weights_lists_its_files(
        self, files: tuple[str, ...], message: str, tmp_path: Path
    ) -> None:
        for file in files:
            (tmp_path / file).touch()
        with pytest.raises(CheckpointError, match=message):
            iter_weights(tmp_path)
