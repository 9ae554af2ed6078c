"""The Triton kernels compile for GPUs that this machine does not have."""

import pytest
import torch

pytest.importorskip("triton")

from graftlm.testing.triton_compile import compile_kernel
from graftlm_attention import triton_decode, triton_extend, triton_kv_write
from graftlm_attention.triton_shapes import decode_shape, extend_shape

#: The smallest maximum of shared memory per program on devices of capability 8.0 and later, in bytes: that of 8.6 and
#: 8.9.
SHARED_BYTES = 101376

NO_SCALES = {"key_scales": None, "value_scales": None}
SCALES = {"key_scales": "*i16", "value_scales": "*i16"}
STRIDES = dict.fromkeys(("table_stride", "q_token_stride", "q_head_stride"), "i32")
BATCH = {"page_table": "*i32", "seq_lens": "*i32", "num_splits": "i32", "min_tokens": "i32", **STRIDES}


@pytest.fixture(autouse=True)
def _fresh_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def constants(shape, **others):
    sizes = {"BLOCK_M": shape.block_m, "BLOCK_N": shape.block_n, "BLOCK_D": shape.block_d}
    return {"NUM_KV_HEADS": 8, "GROUP": 4, "PAGE_SIZE": 16, "WINDOW": None, "cap_scale": None, **sizes, **others}


def options(shape):
    return {"num_warps": shape.num_warps, "num_stages": shape.num_stages}


@pytest.mark.few(instruction=1)
@pytest.mark.parametrize(
    ("head_dim", "query_len", "special", "instruction"),
    [
        (128, 4096, {}, "wgmma.mma_async"),
        (128, 4096, {"keys": "*i8", "values": "*i8", **SCALES}, "wgmma.mma_async"),
        (80, 4, {"cap_scale": "fp32", "WINDOW": 100, "sinks": "*fp32"}, "mma.sync"),
    ],
)
def test_chunks_compile_to_tensor_core_instructions(head_dim, query_len, special, instruction):
    shape = extend_shape(4, head_dim, torch.bfloat16, query_len)
    tensors = dict.fromkeys(("q", "keys", "values", "out"), "*bf16")
    tables = {"cu_seqlens_q": "*i32", "tile_requests": "*i32", "num_decodes": "i32", "score_scale": "fp32"}
    arguments = {
        **tensors,
        **NO_SCALES,
        **BATCH,
        **tables,
        "sinks": None,
        **constants(shape, HEAD_DIM=head_dim),
        **special,
    }
    compiled = compile_kernel(triton_extend._extend_kernel, arguments, 90, options(shape))
    assert instruction in compiled.asm["ptx"]
    assert compiled.metadata.shared <= SHARED_BYTES


@pytest.mark.few(capability=1)
@pytest.mark.parametrize(
    ("cache", "capability", "special"),
    [("*fp8e4nv", 89, {}), ("*bf16", 80, {"sinks": "*fp32"}), ("*i8", 80, SCALES)],
)
def test_decodes_compile_to_tensor_core_instructions(cache, capability, special):
    shape = decode_shape(4, 128, torch.bfloat16)
    tensors = {"q": "*bf16", "keys": cache, "values": cache, "out": "*fp32", "lse": "*fp32", "score_scale": "fp32"}
    arguments = {**tensors, **NO_SCALES, **BATCH, "sinks": None, **constants(shape, HEAD_DIM=128), **special}
    compiled = compile_kernel(triton_decode._decode_kernel, arguments, capability, options(shape))
    assert "mma.sync" in compiled.asm["ptx"]
    assert compiled.metadata.shared <= SHARED_BYTES


@pytest.mark.parametrize(
    ("kernel", "arguments"),
    [
        (
            triton_extend._map_kernel,
            {"tile_requests": "*i32", "cu_seqlens_q": "*i32", "num_decodes": "i32", "TILE_TOKENS": 32, "BLOCK": 128},
        ),
        (
            triton_decode._merge_kernel,
            {"partial": "*fp32", "lse": "*fp32", "out": "*bf16", "seq_lens": "*i32", "num_splits": "i32"}
            | {"min_tokens": "i32", "NUM_HEADS": 32, "HEAD_DIM": 80, "WINDOW": 100, "BLOCK_N": 64, "BLOCK_D": 128},
        ),
        (
            triton_kv_write._write_kernel,
            {"k": "*bf16", "v": "*bf16", "keys": "*fp8e4nv", "values": "*i8", "out_slots": "*i64"}
            | {"key_scales": None, "value_scales": "*i16"}
            | {f"{name}_{kind}_stride": "i32" for name in "kv" for kind in ("token", "head")}
            | {"num_rows": "i32", "NUM_HEADS": 8, "HEAD_DIM": 128, "BLOCK_ROWS": 16, "BLOCK_D": 128},
        ),
    ],
)
def test_small_kernels_compile(kernel, arguments):
    assert ".entry" in compile_kernel(kernel, arguments, 90).asm["ptx"]
