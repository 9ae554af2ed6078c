"""The kernel compared with numpy: on a device if there is one, and in Triton's interpreter."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch

#: Rows of the scores, masked rows, columns, columns of the memory around them.
SHAPES = [
    (1, [0], 1, 1),
    (3, [0, 2], 31, 40),
    (4, [3], 1024, 1024),
    (4, [0, 1, 2, 3], 1025, 1100),
    (5, [1, 4], 3001, 3001),
    (2, [], 64, 64),
]


def check(device, dtype):
    """Compare the kernel with numpy for every shape, and for masks that allow everything, nothing and random tokens."""
    from graftlm.execution.bitmask_kernel import forbid_in_place

    draw = np.random.default_rng(0)
    for num_rows, rows, vocab_size, row_stride in SHAPES:
        for share in (0.0, 0.5, 1.0):
            allowed = draw.random((len(rows), vocab_size)) < share
            # Bits past the vocabulary are set: they must not be read as columns of the next row.
            padded = np.ones((len(rows), -(-vocab_size // 32) * 32), dtype=np.uint8)
            padded[:, :vocab_size] = allowed
            bits = np.packbits(padded, axis=1, bitorder="little").view(np.int32)
            memory = torch.randn(num_rows, row_stride).to(device, dtype)
            memory[0, 0] = torch.nan
            expected = memory.cpu().clone()
            expected[:, :vocab_size][rows] = expected[:, :vocab_size][rows].masked_fill(
                torch.from_numpy(~allowed), -torch.inf
            )
            at = torch.tensor(rows, dtype=torch.int64, device=device)
            forbid_in_place(memory[:, :vocab_size], at, torch.from_numpy(bits).to(device))
            torch.testing.assert_close(memory.cpu(), expected, rtol=0, atol=0, equal_nan=True)


def test_the_interpreted_kernel_equals_numpy():
    pytest.importorskip("triton")
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_the_kernel_compiles_for_a_device(tmp_path, monkeypatch):
    pytest.importorskip("triton")
    from graftlm.execution import bitmask_kernel
    from graftlm.testing.triton_compile import compile_kernel

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    strides = {"scores_stride": "i32", "bits_stride": "i32", "vocab_size": "i32"}
    arguments = {"scores": "*bf16", "rows": "*i64", "bits": "*i32", **strides, "BLOCK": 1024}
    assert "st.global" in compile_kernel(bitmask_kernel._forbid_kernel, arguments, 80).asm["ptx"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_compiled_kernel_equals_numpy(dtype):
    check(torch.device("cuda"), dtype)


if __name__ == "__main__":
    check(torch.device("cpu"), torch.float32)
    from graftlm.execution.bitmask_kernel import forbid_in_place

    with pytest.raises(ValueError, match="columns of stride 1"):
        forbid_in_place(torch.zeros(4, 3).T, torch.tensor([0]), torch.zeros(1, 1, dtype=torch.int32))
