"""A fingerprint changes with everything that keys and values depend on, and with nothing else."""

import os
import shutil

import pytest

from graftlm.contracts import AttentionLayer
from graftlm.fingerprint import model_fingerprint

LAYERS = [AttentionLayer(0, 4, 2, 8, 1.0)]


@pytest.fixture
def folder(checkpoint, tmp_path):
    return shutil.copytree(checkpoint("llama"), tmp_path / "copy")


def flip_a_byte(folder, offset):
    file = sorted(folder.glob("*.safetensors"))[0]
    data = bytearray(file.read_bytes())
    data[offset] ^= 1
    file.write_bytes(data)


def test_a_copy_elsewhere_has_the_same(checkpoint, folder):
    for file in folder.iterdir():
        os.utime(file, (0, 0))
    assert model_fingerprint(folder, "float32", LAYERS) == model_fingerprint(checkpoint("llama"), "float32", LAYERS)


@pytest.mark.parametrize(
    "change",
    [
        lambda folder: flip_a_byte(folder, 20),  # in the header
        lambda folder: flip_a_byte(folder, -1),  # in a tensor
        lambda folder: sorted(folder.glob("*.safetensors"))[1].unlink(),
        lambda folder: (folder / "config.json").write_text((folder / "config.json").read_text() + " "),
    ],
)
def test_another_configuration_or_weight_has_another(folder, change):
    before = model_fingerprint(folder, "float32", LAYERS)
    change(folder)
    assert model_fingerprint(folder, "float32", LAYERS) != before


def test_another_dtype_or_layout_has_another(folder):
    shapes = [("float32", LAYERS), ("bfloat16", LAYERS), ("float32", [AttentionLayer(0, 4, 1, 8, 1.0)])]
    assert len({model_fingerprint(folder, dtype, layers) for dtype, layers in shapes}) == 3


def test_large_files_are_sampled_from_their_beginning_to_their_end(folder):
    file = folder / "large.safetensors"
    prints = set()
    for offset in (None, 0, -1):
        with file.open("wb") as stream:
            stream.truncate(16 * 2**20)  # sparse
            if offset is not None:
                stream.seek(offset, os.SEEK_SET if offset == 0 else os.SEEK_END)
                stream.write(b"x")
        prints.add(model_fingerprint(folder, "float32", LAYERS))
    assert len(prints) == 3
