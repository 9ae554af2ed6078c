"""The Triton kernels compared with PyTorch's operations: on a device if there is one, and in Triton's interpreter."""

import os
import subprocess
import sys

import pytest
import torch

from graftlm.errors import InvariantError
from graftlm.layers.ops import TorchOps


def same(got, expected):
    assert got.is_contiguous()
    exact = got.dtype is torch.float32
    tolerance = 1e-5 if exact else 2**-6
    torch.testing.assert_close(got, expected.contiguous(), rtol=tolerance, atol=tolerance)


def check(device, dtype):
    """Compare every operation for no rows, an odd number, many blocks, and heads with any strides."""
    from graftlm.layers.ops.triton_ops import TritonOps

    ops, reference = TritonOps(), TorchOps()

    def draw(*shape, dtype=dtype):
        return torch.randn(shape).to(device, dtype)

    for num_rows, size in [(0, 8), (1, 7), (3, 129), (2, 1030)]:
        x, residual, gate_up = draw(num_rows, size), draw(num_rows, size), draw(num_rows, 2 * size)
        for weight in (draw(size), draw(size, dtype=torch.float32)):
            for stream in (None, residual):
                got, expected = (by.add_rms_norm(x, stream, weight, 1e-5) for by in (ops, reference))
                same(got[0], expected[0])
                assert torch.equal(got[1], expected[1])
        for hidden_act in ("silu", "gelu_pytorch_tanh", "relu"):
            same(ops.act_and_mul(gate_up, hidden_act), reference.act_and_mul(gate_up, hidden_act))
    for num_tokens, num_heads, head_dim, in_memory in [(0, 2, 8, 2), (1, 1, 2, 1), (3, 5, 24, 7)]:
        heads = draw(num_tokens, in_memory, head_dim)[:, :num_heads]
        cos, sin = draw(num_tokens, 1, head_dim), draw(num_tokens, 1, head_dim)
        same(ops.rotate(heads, cos, sin), reference.rotate(heads, cos, sin))
        for weight in (draw(num_heads, head_dim), draw(num_heads, head_dim, dtype=torch.float32)):
            same(ops.head_norm(heads, weight, 1e-6), reference.head_norm(heads, weight, 1e-6))


def check_misfits():
    from graftlm.layers.ops.triton_ops import TritonOps

    ops, x = TritonOps(), torch.zeros(4, 6)
    for call in (
        lambda: ops.add_rms_norm(x, None, torch.ones(5), 1e-5),
        lambda: ops.add_rms_norm(x, torch.zeros(3, 6), torch.ones(6), 1e-5),
        lambda: ops.head_norm(x.view(4, 3, 2), torch.ones(2, 2), 1e-5),
        lambda: ops.rotate(x.view(4, 3, 2), torch.ones(3, 1, 2), torch.ones(3, 1, 2)),
        lambda: ops.act_and_mul(torch.zeros(4, 5), "silu"),
    ):
        with pytest.raises(InvariantError, match="got"):
            call()


def test_the_interpreted_kernels_equal_torch():
    pytest.importorskip("triton")
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_compiled_kernels_equal_torch(dtype):
    check(torch.device("cuda"), dtype)


if __name__ == "__main__":
    check(torch.device("cpu"), torch.float32)
    check_misfits()
