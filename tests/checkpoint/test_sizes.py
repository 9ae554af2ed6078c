"""Sizes in config.json that do not match the size of the weight files are refused before a model is created."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from graftlm.checkpoint import check_sizes
from graftlm.contracts import ModelConfig
from graftlm.errors import CheckpointError

SIZES = {"vocab_size": 32, "hidden_size": 8, "num_hidden_layers": 2, "num_labels": None, "head_dim": 4}
TENSORS = {f"model.layers.{i}.norm.weight": torch.ones(8) for i in range(2)} | {"embed": torch.ones(32, 8)}


def config(**changes: Any) -> ModelConfig:
    return ModelConfig(("A",), 32, 64, raw=SIZES | changes)


@pytest.fixture(scope="module", params=["one file", "shards", "gguf"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    if request.param == "gguf":
        writer = gguf.GGUFWriter(folder / "m.gguf", "llama")
        for name, tensor in TENSORS.items():
            writer.add_tensor(name, np.asarray(tensor))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return folder / "m.gguf"
    if request.param == "one file":
        save_file(TENSORS, folder / "model.safetensors")
        return folder
    for i, (name, tensor) in enumerate(TENSORS.items()):
        save_file({name: tensor}, folder / f"{i}.safetensors")
    index = {"weight_map": {name: f"{i}.safetensors" for i, name in enumerate(TENSORS)}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


@pytest.mark.parametrize("changes", [{}, {"num_hidden_layers": 3}, {"num_hidden_layers": "many", "head_dim": True}])
def test_sizes_that_match_the_files_are_accepted(checkpoint: Path, changes: dict[str, Any]) -> None:
    assert check_sizes(config(**changes), checkpoint) is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 4}, "num_hidden_layers 4, but the weights are 3 tensors"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers 1000000000, but"),
        ({"num_hidden_layers": None, "n_layer": 10**9}, "n_layer 1000000000, but"),
        ({"num_nextn_predict_layers": 10**9}, "num_nextn_predict_layers 1000000000, but"),
        ({"vocab_size": 10**12}, "vocab_size 1000000000000 and hidden_size 8, but the weights have"),
        ({"hidden_size": 10**9}, "vocab_size 32 and hidden_size 1000000000, but"),
        ({"num_local_experts": 10**9}, "num_local_experts 1000000000 and hidden_size 8, but"),
        ({"n_routed_experts": 10**9}, "n_routed_experts 1000000000"),
        ({"num_labels": 10**9}, "num_labels 1000000000"),
        ({"intermediate_size": 10**400}, "intermediate_size 1000"),
    ],
)
def test_sizes_too_large_for_the_files_are_refused(checkpoint: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        check_sizes(config(**changes), checkpoint)
