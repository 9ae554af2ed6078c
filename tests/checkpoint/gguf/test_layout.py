"""A GGUF file is read as by the package `gguf`, and other files are refused."""

import struct

import gguf
import numpy as np
import pytest

from graftlm.checkpoint.gguf.layout import read_layout
from graftlm.errors import CheckpointError

KINDS = gguf.GGUFValueType
ENTRIES = {
    "a.uint8": (200, KINDS.UINT8),
    "a.int8": (-100, KINDS.INT8),
    "a.uint16": (60_000, KINDS.UINT16),
    "a.int16": (-30_000, KINDS.INT16),
    "a.uint32": (4_000_000_000, KINDS.UINT32),
    "a.int32": (-2_000_000_000, KINDS.INT32),
    "a.float32": (0.5, KINDS.FLOAT32),
    "a.bool": (True, KINDS.BOOL),
    "a.string": ("a text, ünd more", KINDS.STRING),
    "a.uint64": (2**63, KINDS.UINT64),
    "a.int64": (-(2**62), KINDS.INT64),
    "a.float64": (1e-300, KINDS.FLOAT64),
    "an.array.of.numbers": ([1, -2, 3], KINDS.ARRAY),
    "an.array.of.bools": ([True, False], KINDS.ARRAY),
}


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for key, (value, kind) in ENTRIES.items():
        writer.add_key_value(key, value, kind)
    writer.add_key_value("an.array.of.texts", ["one", "", "drei"], KINDS.ARRAY)
    writer.add_uint32("after.the.texts", 7)
    for i, shape in enumerate([(3,), (2, 5), (2, 3, 4)]):
        writer.add_tensor(f"tensor{i}", np.full(shape, i, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_every_type_of_metadata_is_read_and_lists_of_texts_are_skipped(file):
    metadata = read_layout(file).metadata
    expected = {key: value for key, (value, _) in ENTRIES.items()}
    assert metadata == expected | {"general.architecture": "llama", "after.the.texts": 7}


def test_tensor_offsets_equal_those_of_the_package(file):
    layout = read_layout(file)
    tensors = gguf.GGUFReader(file).tensors
    assert [(it.name, it.shape, it.type_id, it.offset) for it in layout.tensors] == [
        (it.name, tuple(it.shape[::-1].tolist()), int(it.tensor_type), it.data_offset) for it in tensors
    ]


HEADER = b"GGUF" + struct.pack("<IQQ", 3, 0, 1)
KEY = struct.pack("<Q", 1) + b"k"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "truncated or not a GGUF file"),
        (b"GGML" + bytes(20), "magic number b'GGML'"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "version 50331648"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1"),
        (HEADER, "has 24 bytes, expected at least 32"),
        (HEADER + struct.pack("<Q", 2**60), "expected at least"),
        (HEADER + KEY + struct.pack("<I", 13), "unknown type 13"),
        (HEADER + KEY + struct.pack("<IIQ", 9, 9, 1), "unknown type 9"),
        (HEADER + KEY + struct.pack("<IIQ", 9, 8, 2**60), "truncated or not a GGUF file"),
        (HEADER + KEY + struct.pack("<IIQQ", 9, 8, 2, 2**63), "truncated or not a GGUF file"),
        (HEADER + KEY + struct.pack("<IIQ", 9, 4, 2**60), "expected at least"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + KEY + struct.pack("<I", 9), "9 dimensions, expected at most 4"),
        (HEADER + struct.pack("<Q", 17) + b"general.alignment" + struct.pack("<II", 4, 0), "general.alignment"),
        (HEADER + struct.pack("<Q", 1) + b"\xff" + struct.pack("<II", 4, 0), "utf-8"),
    ],
)
def test_a_file_that_is_not_gguf_is_refused(tmp_path, content, message):
    (tmp_path / "m.gguf").write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"m.gguf.*{message}"):
        read_layout(tmp_path / "m.gguf")
