"""The compiled kernels compared with PyTorch's operations."""

import os
import shutil

import pytest
import torch

from graftlm.errors import InvariantError
from graftlm.layers.kernel_build import user_cache_dir
from graftlm.layers.ops import NativeOps, TorchOps

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
#: Rows and sizes: none, shorter than a vector, odd, whole vectors, enough for several threads.
ROWS = pytest.mark.parametrize(("num_rows", "size"), [(0, 8), (1, 1), (3, 7), (5, 129), (2, 1024), (71, 1000)])
#: Tokens, heads, dimensions of a head, heads in memory.
HEADS = pytest.mark.parametrize("shape", [(0, 2, 8, 2), (1, 1, 2, 1), (3, 5, 24, 7), (2, 6, 64, 9), (90, 12, 64, 12)])

TORCH = TorchOps()


@pytest.fixture(scope="module")
def native():
    return NativeOps.load("g++", user_cache_dir(os.environ))


@pytest.fixture(autouse=True)
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def draw(*shape, dtype):
    return (torch.randn(shape) * 2).to(dtype)


def assert_same(got, expected):
    """Check float32 up to rounding, and bfloat16 bit by bit except for a few rounded values."""
    assert got.dtype == expected.dtype
    assert got.is_contiguous()
    if got.dtype is torch.float32:
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)
        return
    # Norms and gates round twice, and each rounding may go either way: up to two units in the last place.
    torch.testing.assert_close(got, expected, rtol=2**-6, atol=1e-6)
    assert ((got.double() - expected.double()).abs() > 1e-6).sum() <= got.numel() * 0.01


@DTYPES
@ROWS
def test_residuals_are_added_and_rows_normalised(native, dtype, num_rows, size):
    x, residual, weight = (draw(*shape, dtype=dtype) for shape in ((num_rows, size), (num_rows, size), (size,)))
    before = x.clone(), residual.clone()
    got, expected = native.add_rms_norm(x, residual, weight, 1e-5), TORCH.add_rms_norm(x, residual, weight, 1e-5)
    assert_same(got[0], expected[0])
    assert torch.equal(got[1], expected[1])
    assert torch.equal(x, before[0])
    assert torch.equal(residual, before[1])


@DTYPES
@ROWS
def test_rows_without_a_residual_are_normalised_and_returned(native, dtype, num_rows, size):
    x, weight = draw(num_rows, size, dtype=dtype), draw(size, dtype=torch.float32)  # a weight of Gemma's kind
    normed, stream = native.add_rms_norm(x, None, weight, 1e-6)
    assert_same(normed, TORCH.add_rms_norm(x, None, weight, 1e-6)[0])
    assert stream is x


@DTYPES
@HEADS
@pytest.mark.parametrize("wide_weight", [False, True])
def test_heads_are_normalised(native, dtype, shape, wide_weight):
    num_tokens, num_heads, head_dim, in_memory = shape
    heads = draw(num_tokens, in_memory, head_dim, dtype=dtype)[:, :num_heads]
    weight = draw(num_heads, head_dim, dtype=torch.float32 if wide_weight else dtype)
    assert_same(native.head_norm(heads, weight, 1e-6), TORCH.head_norm(heads, weight, 1e-6).contiguous())


@DTYPES
@HEADS
def test_heads_are_rotated(native, dtype, shape):
    num_tokens, num_heads, head_dim, in_memory = shape
    heads = draw(num_tokens, in_memory, head_dim, dtype=dtype)[:, :num_heads]
    cos, sin = (draw(num_tokens, 1, head_dim, dtype=dtype) for _ in range(2))
    assert_same(native.rotate(heads, cos, sin), TORCH.rotate(heads, cos, sin).contiguous())


def test_heads_may_have_any_strides(native):
    heads = draw(6, 5, 16, dtype=torch.float32).transpose(0, 1)
    cos, sin = (draw(5, 1, 16, dtype=torch.float32) for _ in range(2))
    assert_same(native.rotate(heads, cos, sin), TORCH.rotate(heads, cos, sin).contiguous())


@DTYPES
@ROWS
@pytest.mark.parametrize("hidden_act", ["silu", "swish", "gelu_pytorch_tanh"])
def test_gates_are_activated_and_multiplied(native, dtype, num_rows, size, hidden_act):
    gate_up = draw(num_rows, 2 * size, dtype=dtype)
    gate, up = gate_up.double().chunk(2, dim=-1)
    # Computed in double precision, because PyTorch's GELU loses digits near zero. Gates are rounded, then the product.
    gated = (gate * EXPONENTS[hidden_act](gate).sigmoid()).to(dtype)
    assert_same(native.act_and_mul(gate_up, hidden_act), (gated.double() * up).to(dtype))


EXPONENTS = {
    "silu": lambda x: x,
    "swish": lambda x: x,
    "gelu_pytorch_tanh": lambda x: (8 / torch.pi) ** 0.5 * (x + 0.044715 * x**3),
}


@pytest.mark.parametrize(("hidden_act", "exponent"), EXPONENTS.items(), ids=EXPONENTS)
def test_activations_are_right_over_the_whole_range(native, hidden_act, exponent):
    gate = torch.cat([torch.linspace(-90, 90, 4001), torch.tensor([0.0, -0.0, 1e-30, -1e10, 1e10])])
    got = native.act_and_mul(torch.stack([gate, torch.ones_like(gate)]).view(1, -1), hidden_act)[0]
    expected = gate.double() * exponent(gate.double()).sigmoid()
    # The exponent is float32 and may be 88; its rounding is a relative error of 5e-6.
    torch.testing.assert_close(got.double(), expected, rtol=2e-5, atol=1e-36)
    near = gate.abs() < 4
    torch.testing.assert_close(got[near].double(), expected[near], rtol=2e-6, atol=0)


@DTYPES
def test_nan_and_infinity_are_propagated(native, dtype):
    row = torch.tensor([[torch.nan, torch.inf, 1.0, 3.3e38]]).to(dtype)
    gated = native.act_and_mul(torch.cat([row, torch.full_like(row, 2.0)], dim=1), "silu")
    assert gated[0].isnan().tolist() == [True, False, False, False]
    assert gated[0].isinf().tolist() == [False, True, False, True]
    normed, stream = native.add_rms_norm(row, torch.ones_like(row), torch.ones(4, dtype=dtype), 1e-6)
    assert stream[0].isnan().tolist() == [True, False, False, False]
    assert normed.isnan().all()


@pytest.mark.parametrize("ops", ["float16", "columns", "mixed residual", "relu"])
def test_inputs_that_the_kernels_do_not_support_are_computed_by_torch(native, ops):
    x = draw(4, 6, dtype=torch.float32)
    calls = {
        "float16": lambda by: by.add_rms_norm(x.half(), x.half(), torch.ones(6, dtype=torch.float16), 1e-5)[0],
        "columns": lambda by: by.add_rms_norm(x.T, None, torch.ones(4), 1e-5)[0],
        "mixed residual": lambda by: by.add_rms_norm(x.bfloat16(), x, torch.ones(6), 1e-5)[0],
        "relu": lambda by: by.act_and_mul(x, "relu"),
    }
    got, expected = calls[ops](native), calls[ops](TORCH)
    assert got.dtype == expected.dtype
    assert torch.equal(got, expected)


X = torch.zeros(4, 6)
MISFITS = {
    "weight": lambda by: by.add_rms_norm(X, None, torch.ones(5), 1e-5),
    "residual": lambda by: by.add_rms_norm(X, torch.zeros(3, 6), torch.ones(6), 1e-5),
    "head weight": lambda by: by.head_norm(X.view(4, 3, 2), torch.ones(2, 2), 1e-5),
    "cosines": lambda by: by.rotate(X.view(4, 3, 2), torch.ones(3, 1, 2), torch.ones(3, 1, 2)),
    "odd heads": lambda by: by.rotate(X.view(4, 2, 3), torch.ones(4, 1, 3), torch.ones(4, 1, 3)),
    "odd gates": lambda by: by.act_and_mul(torch.zeros(4, 5), "silu"),
}


@pytest.mark.parametrize("call", MISFITS.values(), ids=MISFITS)
def test_mismatched_sizes_are_refused(native, call):
    with pytest.raises(InvariantError, match="got"):
        call(native)
