import copy

import pytest
import torch

from graftlm.errors import InvariantError
from graftlm_quantization.coded_matrix import encode
from graftlm_quantization.native_linear import NativeLinear
from graftlm_quantization.torch_linear import TorchLinear


def draw(*size, seed=0):
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("bits", "group_size"), [(4, 32), (4, 128), (8, 384), (8, 64)])
def test_any_number_of_rows_gives_what_the_decoded_weights_give(library, dtype, bits, group_size):
    """Tiles are cut differently for each number, 96 rows and more are multiplied another way, 1,025 take two passes."""
    matrix = encode(draw(45, 384, seed=1), bits, group_size)
    kernel, bias = NativeLinear(matrix, draw(45, seed=2), library), draw(45, seed=2)
    weight = kernel.decoded()
    x = draw(1025, 384, seed=3).to(dtype)
    expected = x.float() @ weight.T + bias
    tolerance = (1e-5 if dtype is torch.float32 else 5e-3) * float(expected.abs().max())
    for num_rows in (*range(1, 27), 36, 65, 95, 96, 97, 1025):
        out = kernel(x[:num_rows])
        assert out.dtype is dtype
        assert torch.allclose(out.float(), expected[:num_rows], rtol=0, atol=tolerance), num_rows


@pytest.mark.parametrize(("bits", "group_size"), [(4, 64), (8, 1024)])
@pytest.mark.parametrize("size", [(700, 1024), (20, 1024)])  # several panels, and less than one
def test_decoded_panels_give_the_same(library, size, bits, group_size):
    """As on CPUs with matrix units, where PyTorch multiplies."""
    matrix, bias = encode(draw(*size, seed=1), bits, group_size), draw(size[0], seed=2)
    by_panels = copy.copy(library)
    by_panels.panel_rows = 24
    x = draw(30, size[1]).bfloat16()
    expected = x.float() @ matrix.decoded(0, matrix.num_blocks).T + bias
    out = NativeLinear(matrix, bias, by_panels)(x).float()
    assert torch.allclose(out, expected, rtol=0, atol=1e-2 * float(expected.abs().max()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_does_not_depend_on_the_others_beyond_rounding(library, dtype):
    kernel = NativeLinear(encode(draw(96, 128, seed=1), 4, 64), None, library)
    x = draw(40, 128).to(dtype)
    alone = torch.cat([kernel(row[None]) for row in x])
    assert torch.allclose(alone.float(), kernel(x).float(), rtol=0, atol=0.1 if dtype is torch.bfloat16 else 1e-4)


def test_activations_need_not_be_contiguous(library):
    kernel = NativeLinear(encode(draw(64, 128, seed=1), 4, 64), None, library)
    wide = draw(6, 256)
    assert torch.equal(kernel(wide[::2, :128]), kernel(wide[::2, :128].contiguous()))


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.zeros(1, 64), r"expected activations of 128 features, got \[1, 64\]"),
        (torch.zeros(1, 128, dtype=torch.float16), "float32 and torch.bfloat16, got torch.float16"),
    ],
)
def test_what_the_kernel_cannot_read_is_refused(library, x, message):
    kernel = NativeLinear(encode(draw(32, 128), 8, 128), None, library)
    with pytest.raises(InvariantError, match=message):
        kernel(x)


@pytest.mark.parametrize("bits", [4, 8])
def test_both_kernels_agree(library, bits):
    matrix, bias = encode(draw(1100, 128, seed=1), bits, 64), draw(1100)
    x = draw(5, 128)
    assert torch.allclose(NativeLinear(matrix, bias, library)(x), TorchLinear(matrix, bias)(x), rtol=0, atol=1e-4)
