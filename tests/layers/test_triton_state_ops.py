"""The Triton kernels equal PyTorch's operations: on a device if there is one, and in Triton's interpreter."""

import os
import subprocess
import sys

import pytest
import torch

from graftlm.layers.state_ops import TorchStateOps
from graftlm.testing.batches import make_state_batch

#: (first token, number of tokens, source, target); the first three decode, and the first of them in place.
SEGMENTS = [(0, 1, 1, 1), (1, 1, 2, 6), (2, 1, 0, 3), (3, 9, 0, 7), (12, 5, 7, 4)]
NUM_DECODES, NUM_TOKENS, NUM_SLOTS = 3, 17, 8


def check(device, dtype):
    """Compare every operation, for sizes that are powers of 2 and others, and for several programs per head."""
    from graftlm.layers.state_ops.triton_state_ops import TritonStateOps

    ops, reference = TritonStateOps(), TorchStateOps()
    batch = make_state_batch(SEGMENTS, NUM_DECODES, device)

    def draw(*shape, dtype=torch.float32):
        return torch.randn(shape).to(device, dtype)

    def same(name, arguments, state, **options):
        states = state.clone(), state.clone()
        got, expected = (
            getattr(by, name)(*arguments, own, batch, **options)
            for by, own in zip((ops, reference), states, strict=True)
        )
        tolerance = 1e-4 if got.dtype is torch.float32 else 2**-6
        torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(*states, rtol=1e-4, atol=1e-4)

    for num_channels, kernel_size, has_bias, silu in [(7, 2, False, False), (300, 4, True, True)]:
        x = draw(NUM_TOKENS, num_channels + 5, dtype=dtype)[:, 3:-2]
        bias = draw(num_channels, dtype=dtype) if has_bias else None
        state = draw(NUM_SLOTS, kernel_size - 1, num_channels, dtype=dtype)
        same("causal_conv", (x, draw(kernel_size, num_channels, dtype=dtype), bias), state, silu=silu)
    for num_heads, num_groups, size, width in [(4, 2, 5, 6), (2, 1, 64, 128)]:
        b, c = draw(NUM_TOKENS, 2, num_groups, width).unbind(1)
        arguments = draw(NUM_TOKENS, num_heads, size), -draw(NUM_TOKENS, num_heads).abs(), b, c
        same("ssd_scan", arguments, draw(NUM_SLOTS, num_heads, size, width))
        q, k = (torch.nn.functional.normalize(draw(NUM_TOKENS, num_groups, width), dim=-1) for _ in range(2))
        decays, rates = -draw(NUM_TOKENS, num_heads).abs(), draw(NUM_TOKENS, num_heads).sigmoid()
        arguments = q, k, draw(NUM_TOKENS, num_heads, size), decays, rates
        same("gated_delta_rule", arguments, draw(NUM_SLOTS, num_heads, width, size))


@pytest.mark.full
def test_the_interpreted_kernels_equal_torch():
    pytest.importorskip("triton")
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("capability", [pytest.param(80, marks=pytest.mark.full), 90])
def test_the_kernels_compile(capability):
    pytest.importorskip("triton")
    from graftlm.layers.state_ops import triton_state_ops as module
    from graftlm.testing.triton_compile import compile_kernel

    floats = dict.fromkeys(("x", "log_decay", "b", "c", "q", "k", "v", "beta", "out", "state"), "*fp32")
    slots = {"sources": "*i64", "targets": "*i64"}
    sizes = dict.fromkeys(
        ("num_heads", "heads_per_group", "bc_stride", "size", "width", "key_size", "value_size"), "i32"
    )
    scan = {**floats, **slots, **sizes, "ROWS": 32, "COLUMNS": 128}
    assert compile_kernel(module._ssd_step_kernel, scan, capability).asm["ptx"]
    assert compile_kernel(module._delta_step_kernel, scan | {"ROWS": 128, "COLUMNS": 32}, capability).asm["ptx"]
    conv = dict.fromkeys(("x", "weight", "bias", "out", "state"), "*bf16") | slots
    conv |= {"x_stride": "i32", "num_channels": "i32", "KERNEL": 4, "HAS_BIAS": True, "SILU": True, "BLOCK": 256}
    assert compile_kernel(module._conv_step_kernel, conv, capability).asm["ptx"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_compiled_kernels_equal_torch(dtype):
    check(torch.device("cuda"), dtype)


if __name__ == "__main__":
    check(torch.device("cpu"), torch.float32)
