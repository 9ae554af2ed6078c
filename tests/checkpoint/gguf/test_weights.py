"""The tensors of a GGUF file equal those of the original checkpoint, except for quantization error."""

import logging
import struct
import sys

import gguf
import numpy as np
import pytest
import torch

from graftlm.checkpoint import iter_weights
from graftlm.checkpoint.gguf.file import GGUFFile
from graftlm.errors import CheckpointError, UnsupportedArchitectureError, WeightError
from graftlm.testing.gguf_files import write_gguf
from graftlm.testing.tiny_models import write_tiny_checkpoint

FAMILIES = {
    "llama": ("llama", {}),
    "mistral": ("llama", {}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {}),
    "mixtral": ("llama", {}),
    "qwen3_moe": ("qwen3moe", {}),
    "phi3": ("phi3", {}),
    "gemma2": ("gemma2", {"tie_word_embeddings": True}),
    "gemma3_text": ("gemma3", {"tie_word_embeddings": True}),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_names_rows_and_offsets_equal_those_of_the_checkpoint(tmp_path, family):
    architecture, settings = FAMILIES[family]
    folder = write_tiny_checkpoint(tmp_path / "hf", family, **settings)
    got = dict(iter_weights(write_gguf(folder, tmp_path / "m.gguf", architecture)))
    plain = dict(iter_weights(folder))
    assert got.keys() == plain.keys()
    for name, tensor in plain.items():
        torch.testing.assert_close(got[name], tensor, rtol=0, atol=1e-6 if "norm" in name else 0)


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0"])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_quantized_tensors_are_decoded(tmp_path, kind, dtype, caplog):
    folder = write_tiny_checkpoint(tmp_path / "hf")
    with caplog.at_level(logging.INFO, "graftlm"):
        got = dict(iter_weights(write_gguf(folder, tmp_path / "m.gguf", kind=kind), dtype))
    stored = gguf.GGMLQuantizationType[kind]
    is_plain = kind in ("F16", "BF16")
    for name, tensor in iter_weights(folder):
        if tensor.dim() == 1:
            expected = tensor
        elif is_plain:
            expected = tensor.to(torch.float16 if kind == "F16" else torch.bfloat16)
        else:
            values = gguf.quants.dequantize(gguf.quants.quantize(tensor.numpy(), stored), stored)
            expected = torch.from_numpy(values).to(dtype or torch.float32)
        assert got[name].dtype == expected.dtype
        assert torch.equal(got[name], expected), name
    assert (f"16 {kind}) were decoded to" in caplog.text) is not is_plain


def test_a_split_file_gives_all_tensors_and_a_missing_part_is_named(tmp_path):
    folder = write_tiny_checkpoint(tmp_path / "hf")
    write_gguf(folder, tmp_path / "m.gguf", tensors_per_file=8)
    first = tmp_path / "m-00001-of-00003.gguf"
    assert {name for name, _ in iter_weights(first)} == {name for name, _ in iter_weights(folder)}
    with pytest.raises(CheckpointError, match="number 00001"):
        iter_weights(tmp_path / "m-00002-of-00003.gguf")
    (tmp_path / "m-00003-of-00003.gguf").unlink()
    with pytest.raises(CheckpointError, match=r"lacks m-00003-of-00003.gguf"):
        iter_weights(first)


@pytest.mark.parametrize(
    ("architecture", "module"), [("qwen3moe", "mlp.experts.{}.up_proj"), ("llama", "block_sparse_moe.experts.{}.w3")]
)
def test_experts_are_read_one_by_one(tmp_path, architecture, module):
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", architecture)
    writer.add_head_count(2)
    writer.add_expert_count(3)
    experts = np.random.default_rng(0).normal(size=(3, 4, 32)).astype(np.float32)
    writer.add_tensor(
        "blk.7.ffn_up_exps.weight",
        gguf.quants.quantize(experts, gguf.GGMLQuantizationType.Q8_0),
        raw_dtype=gguf.GGMLQuantizationType.Q8_0,
    )
    finish(writer)
    got = dict(iter_weights(tmp_path / "m.gguf"))
    assert list(got) == [f"model.layers.7.{module.format(i)}.weight" for i in range(3)]
    for tensor, expert in zip(got.values(), experts, strict=True):
        torch.testing.assert_close(tensor, torch.from_numpy(expert), rtol=0, atol=0.02)


def finish(writer):
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_tensor_with_an_unknown_name_keeps_it(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_head_count(2)
    for name in ("blk.0.ssm_conv1d.weight", "strange.weight", "rope_freqs.weight"):
        writer.add_tensor(name, np.ones((2, 2), dtype=np.float32))
    finish(writer)
    assert [name for name, _ in iter_weights(tmp_path / "m.gguf")] == ["blk.0.ssm_conv1d.weight", "strange.weight"]


@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K"])
def test_k_quant_blocks_decode_as_in_transformers(tmp_path, kind):
    from transformers.integrations.gguf.dequant import dequantize

    stored = gguf.GGMLQuantizationType[kind]
    num_values, num_bytes = gguf.GGML_QUANT_SIZES[stored]
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (3, 2 * num_bytes), dtype=np.uint8)
    halves = blocks.reshape(-1, num_bytes)[:, (slice(0, 4) if kind == "Q4_K" else slice(-2, None))]
    halves[:] = rng.uniform(0.01, 1, (6, halves.shape[1] // 2)).astype(np.float16).view(np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tensor("w", blocks, raw_dtype=stored)
    finish(writer)
    got = GGUFFile(tmp_path / "m.gguf").read("w", torch.float32)
    expected = dequantize(torch.from_numpy(blocks), int(stored), torch.float32)
    torch.testing.assert_close(got, expected.view(3, 2 * num_values))


def test_a_tensor_larger_than_a_panel_is_decoded_completely(tmp_path):
    rows = 35_000  # rows of 32 values; more rows than are decoded at a time
    kind = gguf.GGMLQuantizationType.Q8_0
    codes = (np.arange(rows * 32) % 253 - 126).astype(np.int8).reshape(rows, 32)
    scales = (1 + np.arange(rows) % 7).astype(np.float16)[:, None]
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tensor("w", np.hstack((scales.view(np.uint8), codes.view(np.uint8))), raw_dtype=kind)
    finish(writer)
    got = GGUFFile(tmp_path / "m.gguf").read("w", torch.float32)
    assert np.array_equal(got.numpy(), codes * scales.astype(np.float32))


@pytest.mark.parametrize("keep_bytes", [0, 3, 100, -100])
def test_a_truncated_file_is_named(tmp_path, keep_bytes):
    file = write_gguf(write_tiny_checkpoint(tmp_path / "hf"), tmp_path / "m.gguf")
    file.write_bytes(file.read_bytes()[:keep_bytes])
    with pytest.raises(CheckpointError, match=r"m.gguf is truncated or not a GGUF file"):
        iter_weights(file)


def test_a_tensor_type_that_cannot_be_decoded_is_reported(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_head_count(2)
    writer.add_tensor("output.weight", np.zeros((2, 2), dtype=np.int32))
    finish(writer)
    with pytest.raises(WeightError, match=r"'output.weight' is stored as I32"):
        list(iter_weights(tmp_path / "m.gguf"))


@pytest.mark.parametrize(
    ("type_id", "shape", "message"),
    [
        (999, (2, 2), "ggml's type 999, which the installed package gguf does not know"),
        (8, (2, 33), "not whole blocks"),
    ],
)
def test_tensor_types_unknown_to_the_package_are_reported(tmp_path, type_id, shape, message):
    name, key, architecture = (struct.pack("<Q", len(it)) + it for it in (b"w", b"general.architecture", b"llama"))
    sizes = struct.pack("<IQQIQ", 2, *reversed(shape), type_id, 0)
    header = b"GGUF" + struct.pack("<IQQ", 3, 1, 1) + key + struct.pack("<I", 8) + architecture
    (tmp_path / "m.gguf").write_bytes(header + name + sizes + bytes(1000))
    with pytest.raises(CheckpointError, match=message):
        GGUFFile(tmp_path / "m.gguf")


def test_a_number_of_heads_that_does_not_divide_the_rows_is_reported(tmp_path):
    metadata = {"llama.attention.head_count": (3, gguf.GGUFValueType.UINT32)}
    file = write_gguf(write_tiny_checkpoint(tmp_path / "hf"), tmp_path / "m.gguf", metadata=metadata)
    with pytest.raises(
        WeightError, match=r"'blk.0.attn_q.weight' has shape \[64, 64\], whose rows cannot be split into 3 heads"
    ):
        list(iter_weights(file))


def test_a_duplicate_tensor_name_is_refused(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    for name in ("blk.0.attn_q.weight", "blk.0.attn_k.weight"):
        writer.add_tensor(name, np.ones((2, 2), dtype=np.float32))
    finish(writer)
    content = (tmp_path / "m.gguf").read_bytes()
    (tmp_path / "m.gguf").write_bytes(content.replace(b"attn_k", b"attn_q"))
    with pytest.raises(CheckpointError, match=r"m.gguf has the tensor 'blk.0.attn_q.weight' a second time"):
        GGUFFile(tmp_path / "m.gguf")


def test_a_file_without_an_architecture_is_refused(tmp_path):
    (tmp_path / "m.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 0) + bytes(8))
    with pytest.raises(CheckpointError, match=r"has no general.architecture"):
        iter_weights(tmp_path / "m.gguf")


def test_an_unknown_architecture_is_refused(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "rwkv7")
    finish(writer)
    with pytest.raises(UnsupportedArchitectureError, match=r"'rwkv7' is not supported. Supported: llama, qwen2"):
        iter_weights(tmp_path / "m.gguf")


def test_the_error_for_a_missing_package_has_the_install_command(tmp_path, monkeypatch):
    file = write_gguf(write_tiny_checkpoint(tmp_path / "hf"), tmp_path / "m.gguf")
    monkeypatch.setitem(sys.modules, "gguf", None)  # a module that is None in sys.modules cannot be imported
    with pytest.raises(CheckpointError, match=r"pip install 'graftlm\[gguf\]'"):
        iter_weights(file)
