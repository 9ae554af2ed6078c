"""The Triton kernels between matrix products compile; the interpreter accepts more than the compiler."""

import pytest

pytest.importorskip("triton")

from graftlm.layers.ops import triton_ops
from graftlm.testing.triton_compile import compile_kernel

ROWS = dict.fromkeys(("x", "residual", "weight", "out", "total", "heads", "cos", "sin", "gate_up"), "*bf16")
SIZES = dict.fromkeys(("token_stride", "head_stride", "num_heads", "head_dim", "size"), "i32") | {"eps": "fp32"}


@pytest.mark.parametrize("capability", [pytest.param(80, marks=pytest.mark.full), 90])
@pytest.mark.parametrize(
    ("name", "constants"),
    [
        ("_rms_norm_kernel", {"HAS_RESIDUAL": True, "WEIGHT_LAST": True, "BLOCK": 1024}),
        ("_rotate_kernel", {"BLOCK": 128}),
        ("_act_and_mul_kernel", {"ACT": 1, "BLOCK": 1024}),
    ],
)
def test_a_kernel_compiles(name, constants, capability):
    compiled = compile_kernel(getattr(triton_ops, name), ROWS | SIZES | constants, capability)
    assert ".entry" in compiled.asm["ptx"]
