"""A fingerprint changes with everything on which keys and values depend, and with nothing else."""

import os
import shutil

import pytest

from graftlm.assembly.fingerprint import model_fingerprint
from graftlm.assembly.weight_digests import WeightDigests
from graftlm.contracts import AttentionLayer
from graftlm.testing.gguf_files import write_gguf

LAYERS = [AttentionLayer(0, 4, 2, 8, 1.0)]


@pytest.fixture
def folder(checkpoint, tmp_path):
    return shutil.copytree(checkpoint("llama"), tmp_path / "copy")


def fingerprint(folder, dtype, layers):
    return model_fingerprint(folder, dtype, layers, WeightDigests(None))


def flip_a_byte(folder, offset):
    file = sorted(folder.glob("*.safetensors"))[0]
    data = bytearray(file.read_bytes())
    data[offset] ^= 1
    file.write_bytes(data)


def test_a_copy_of_the_checkpoint_has_the_same_fingerprint(checkpoint, folder):
    for file in folder.iterdir():
        os.utime(file, (0, 0))
    assert fingerprint(folder, "float32", LAYERS) == fingerprint(checkpoint("llama"), "float32", LAYERS)


def test_the_fingerprint_of_a_gguf_file_changes_with_the_file(checkpoint, tmp_path):
    file = write_gguf(checkpoint("llama"), tmp_path / "one.gguf")
    before = fingerprint(file, "float32", LAYERS)
    assert fingerprint(file.rename(tmp_path / "two.gguf"), "float32", LAYERS) != before  # the name of a shard counts
    write_gguf(checkpoint("llama"), file, kind="F16")
    assert fingerprint(file, "float32", LAYERS) != before


@pytest.mark.parametrize(
    "change",
    [
        lambda folder: flip_a_byte(folder, 20),  # a byte of the header
        lambda folder: flip_a_byte(folder, -1),  # a byte of a tensor
        lambda folder: sorted(folder.glob("*.safetensors"))[1].unlink(),
        lambda folder: (folder / "config.json").write_text((folder / "config.json").read_text() + " "),
    ],
)
def test_another_configuration_or_weight_changes_the_fingerprint(folder, change):
    before = fingerprint(folder, "float32", LAYERS)
    change(folder)
    assert fingerprint(folder, "float32", LAYERS) != before


def test_another_dtype_or_layout_changes_the_fingerprint(folder):
    latent = AttentionLayer(0, 4, 2, 8, 1.0, value_prefix_dim=6)
    shapes = [
        ("float32", LAYERS),
        ("bfloat16", LAYERS),
        ("float32", [AttentionLayer(0, 4, 1, 8, 1.0)]),
        ("float32", [latent]),
    ]
    assert len({fingerprint(folder, dtype, layers) for dtype, layers in shapes}) == 4


def test_the_kv_dtype_changes_the_fingerprint(folder):
    prints = {
        model_fingerprint(folder, "float32", LAYERS, WeightDigests(None), kv_dtype=kv_dtype)
        for kv_dtype in ("auto", "int8", "fp8")
    }
    assert len(prints) == 3
    assert fingerprint(folder, "float32", LAYERS) in prints


def test_another_rotation_changes_the_fingerprint(folder):
    prints = {model_fingerprint(folder, "float32", LAYERS, WeightDigests(None), None, f) for f in (b"1", b"2", b"2")}
    assert len(prints) == 2


def test_every_byte_of_a_large_file_changes_the_fingerprint(folder):
    file, size = folder / "large.safetensors", 130 * 2**20
    with file.open("wb") as stream:
        stream.truncate(size)  # a sparse file
    prints = {fingerprint(folder, "float32", LAYERS)}
    offsets = [0, 70_000, 2**26 - 1, 2**26, 100 * 2**20 + 12345, size - 1]
    for offset in offsets:
        with file.open("r+b") as stream:
            stream.seek(offset)
            stream.write(b"x")
        prints.add(fingerprint(folder, "float32", LAYERS))
    assert len(prints) == 1 + len(offsets)
