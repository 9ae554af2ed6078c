import math

import pytest
import torch

from graftlm.errors import InvariantError
from graftlm_quantization.coded_matrix import CodedMatrix, encode
from graftlm_quantization.native_linear import NativeLibrary, NativeLinear
from graftlm_quantization.torch_linear import TorchLinear

HAS_MATRIX_UNITS = torch.cpu._is_amx_tile_supported()


@pytest.fixture(scope="module", params=["vectors", "matrix units"] if HAS_MATRIX_UNITS else ["vectors"])
def library(library, kernel_cache, request) -> NativeLibrary:
    """The compiled kernel, for each method of this CPU to multiply bfloat16."""
    return NativeLibrary.load("g++", kernel_cache, use_matrix_units=request.param == "matrix units")


def draw(*size, seed=0):
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("bits", "group_size"), [(4, 32), (4, 128), (4, 384), (8, 384), (8, 64)])
def test_any_number_of_rows_equals_the_product_with_decoded_weights(library, dtype, bits, group_size):
    """Tiles are cut differently for each number; 64 rows and more use another method, 1,025 rows need two passes."""
    matrix = encode(draw(45, 384, seed=1), bits, group_size)
    kernel, bias = NativeLinear(matrix, draw(45, seed=2), library), draw(45, seed=2)
    weight = kernel.decoded()
    x = draw(1025, 384, seed=3).to(dtype)
    expected = x.float() @ weight.T + bias
    tolerance = (1e-5 if dtype is torch.float32 else 5e-3) * float(expected.abs().max())
    for num_rows in (*range(1, 27), 36, 63, 64, 65, 97, 1025):
        out = kernel(x[:num_rows])
        assert out.dtype is dtype
        assert torch.allclose(out.float(), expected[:num_rows], rtol=0, atol=tolerance), num_rows


@pytest.mark.parametrize(
    ("size", "bits", "group_size"),
    [
        ((1, 8), 8, 8),
        ((33, 40), 8, 40),
        ((16, 136), 8, 136),
        ((50, 296), 4, 296),  # a row's only group ends within a tile
        ((70, 48), 4, 16),
        ((31, 120), 8, 24),  # groups end within tiles
        ((32, 192), 4, 96),
        ((65, 768), 8, 256),
    ],
)
def test_groups_and_sizes_need_not_fill_tiles(library, size, bits, group_size):
    kernel, bias = NativeLinear(encode(draw(*size, seed=1), bits, group_size), draw(size[0]), library), draw(size[0])
    x = draw(2049, size[1], seed=2).bfloat16()
    expected = x.float() @ kernel.decoded().T + bias
    for num_rows in (1, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 80, 81, 2049):
        out = kernel(x[:num_rows]).float()
        assert torch.allclose(out, expected[:num_rows], rtol=0, atol=5e-3 * float(expected.abs().max())), num_rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bits", [4, 8])
def test_zero_rows_return_zero_rows_and_read_nothing(library, dtype, bits):
    """Reading this many inputs would be noticed, because they exceed the allocated memory."""
    codes = torch.zeros(1, 1 << 20, 2, 16 * bits, dtype=torch.uint8)
    matrix = CodedMatrix(32, 1 << 23, bits, 1 << 23, codes, torch.zeros(1, 1, 32, 2, dtype=torch.bfloat16))
    assert NativeLinear(matrix, None, library)(torch.empty(0, 1 << 23, dtype=dtype)).shape == (0, 32)


@pytest.mark.parametrize(("bits", "group_size"), [(4, 64), (4, 24), (4, 384), (8, 128), (8, 384)])
@pytest.mark.parametrize("magnitude", [2.0**-120, 1.0, 2.0**100])
def test_few_rows_are_exact_if_inputs_differ_by_orders_of_magnitude(library, bits, group_size, magnitude):
    """As integers, they are multiples of 2**-21 of a power of two near the largest input of their group."""
    matrix, bias = encode(draw(70, 384, seed=1), bits, group_size), torch.zeros(70)
    weight = matrix.decoded(0, matrix.num_blocks).double()
    spread = 2.0 ** torch.randint(-30, 3, (8, 384), generator=torch.Generator().manual_seed(4))
    x = (draw(8, 384, seed=5) * spread * magnitude).bfloat16()
    x[3] = 0
    exact = x.double() @ weight.T
    chunk = math.gcd(group_size, 128)
    largest = x.double().abs().view(8, -1, chunk).amax(-1)
    weights = weight.abs().view(70, -1, chunk).sum(-1)
    bound = exact.abs() * 2**-8 + largest @ weights.T * 2**-21
    kernel = NativeLinear(matrix, bias, library)
    for num_rows in (1, 2, 3, 4):
        for first in range(0, 8, num_rows):
            rows = slice(first, min(8, first + num_rows))
            assert ((kernel(x[rows]).double() - exact[rows]).abs() <= bound[rows]).all()


@pytest.mark.parametrize(("bits", "group_size"), [(4, 64), (8, 1024)])
@pytest.mark.parametrize("num_threads", [1, 3])
def test_many_panels_are_divided_among_threads(library, bits, group_size, num_threads):
    """More panels than fit into the cache at a time, for one thread or two."""
    matrix, bias = encode(draw(1100, 1024, seed=1), bits, group_size), draw(1100, seed=2)
    x, before = draw(70, 1024).bfloat16(), torch.get_num_threads()
    expected = x.float() @ matrix.decoded(0, matrix.num_blocks).T + bias
    torch.set_num_threads(num_threads)
    try:
        for num_rows in (3, 70):
            out = NativeLinear(matrix, bias, library)(x[:num_rows]).float()
            assert torch.allclose(out, expected[:num_rows], rtol=0, atol=5e-3 * float(expected.abs().max())), num_rows
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(("bits", "group_size"), [(4, 64), (4, 384), (8, 64), (8, 384)])
def test_products_are_rounded_once(library, bits, group_size):
    """The bias is added in float32: where it cancels most of a product, the rest is as exact as any other number."""
    matrix, x = encode(draw(45, 384, seed=1), bits, group_size), draw(200, 384, seed=3).bfloat16()
    products = x.double() @ matrix.decoded(0, matrix.num_blocks).double().T
    # From 64 rows on, weights are rounded; AMX scales products instead if a row has one scale.
    are_exact = library.uses_matrix_units and group_size == 384
    for num_rows in (1, 16, 17, 63, 64, 200) if are_exact else (1, 16, 17, 63):
        bias = (0.01 - products[num_rows - 1]).float()
        out = NativeLinear(matrix, bias, library)(x[:num_rows]).double()
        torch.testing.assert_close(out, products[:num_rows] + bias.double(), rtol=2**-8, atol=1e-4)


@pytest.mark.parametrize(("bits", "group_size", "num_inputs"), [(4, 32, 96), (4, 64, 128), (8, 64, 128), (8, 40, 40)])
@pytest.mark.parametrize("num_rows", [2, 17, 40, 70])
def test_nan_stays_in_its_row(library, bits, group_size, num_inputs, num_rows):
    kernel = NativeLinear(encode(draw(33, num_inputs), bits, group_size), None, library)
    x = draw(num_rows, num_inputs, seed=1).bfloat16()
    clean = kernel(x)
    x[1, 1] = torch.nan
    out, others = kernel(x), torch.arange(num_rows) != 1
    assert out[1].isnan().all()
    assert torch.equal(out[others], clean[others])


def test_amx_is_used_if_the_operating_system_permits_it(kernel_cache, library):
    assert NativeLibrary.load("g++", kernel_cache).uses_matrix_units == HAS_MATRIX_UNITS
    assert not NativeLibrary.load("g++", kernel_cache, use_matrix_units=False).uses_matrix_units


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_depends_on_other_rows_only_by_rounding(library, dtype):
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
        (torch.zeros(1, 128, dtype=torch.float16), "float32 or torch.bfloat16, got torch.float16"),
    ],
)
def test_unsupported_inputs_are_refused(library, x, message):
    kernel = NativeLinear(encode(draw(32, 128), 8, 128), None, library)
    with pytest.raises(InvariantError, match=message):
        kernel(x)


@pytest.mark.parametrize("bits", [4, 8])
def test_both_kernels_agree(library, bits):
    matrix, bias = encode(draw(1100, 128, seed=1), bits, 64), draw(1100)
    x = draw(5, 128)
    assert torch.allclose(NativeLinear(matrix, bias, library)(x), TorchLinear(matrix, bias)(x), rtol=0, atol=1e-4)
