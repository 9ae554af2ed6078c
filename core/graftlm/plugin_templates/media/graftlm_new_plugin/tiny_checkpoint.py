"""Writes a small random checkpoint, to try the processor: `python -m graftlm_new_plugin.tiny_checkpoint FOLDER`."""

import json
import sys
from pathlib import Path

import torch
from graftlm.testing.tiny_models import write_tiny_checkpoint as write_text_checkpoint
from safetensors.torch import load_file, save_file

__all__ = ["IMAGE_TOKEN", "write_tiny_checkpoint"]

#: A token of the tiny tokenizer that texts do not contain.
IMAGE_TOKEN = "<|pad|>"


def write_tiny_checkpoint(folder: Path) -> Path:
    """Write a text model with a tower to a folder, which is created if necessary; return the folder."""
    write_text_checkpoint(folder, tokenizer=True)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    whole = {
        "architectures": ["graftlm_new_plugin"],
        "model_type": "graftlm_new_plugin",
        "image_token": IMAGE_TOKEN,
        "image_token_id": 1,
        "text_config": config,
    }
    (folder / "config.json").write_text(json.dumps(whole), encoding="utf-8")
    tensors = load_file(folder / "model.safetensors")
    draw = torch.Generator().manual_seed(0)
    tensors["tower.weight"] = torch.randn((config["hidden_size"], 3), generator=draw)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m graftlm_new_plugin.tiny_checkpoint FOLDER")
    write_tiny_checkpoint(Path(sys.argv[1]))
