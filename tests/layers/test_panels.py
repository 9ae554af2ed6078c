"""Products with matrices in panels, compared with float32 products, for every shape with its own path in the kernel."""

import pytest
import torch

from graftlm.errors import InvariantError, ProviderUnavailableError
from graftlm.layers import GatedLinear
from graftlm.layers.ops import NativeOps
from graftlm.layers.panels import PanelGates, PanelKernels, PanelMatrix

HAS_MATRIX_UNITS = torch.cpu._is_amx_tile_supported()
needs_kernels = pytest.mark.skipif(
    not torch.cpu._is_avx512_bf16_supported(), reason="there are kernels only for CPUs with AVX512-BF16"
)


@pytest.fixture(scope="module", params=["vectors", "matrix units"] if HAS_MATRIX_UNITS else ["vectors"])
def kernels(kernel_cache, request):
    return PanelKernels.load("g++", kernel_cache, use_matrix_units=request.param == "matrix units")


#: Gates are divided by 1 + e^-exponent.
EXPONENTS = {"silu": lambda x: x, "gelu_pytorch_tanh": lambda x: (8 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)}


def activated(product, hidden_act):
    """Compute in double precision, because PyTorch's GELU loses digits near zero; round where PyTorch rounds."""
    gates, gated = product.double().chunk(2, dim=-1)
    gates = (gates * EXPONENTS[hidden_act](gates).sigmoid()).to(product.dtype)
    return (gates.double() * gated).to(product.dtype)


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


@needs_kernels
@pytest.mark.parametrize("num_rows", [*range(8), 11, 12, 13, 16, 17, 19, 25, 32, 33, 49, 191, 192, 193, 400])
@pytest.mark.parametrize(
    ("out_features", "in_features"),
    [(64, 32), (1, 2), (15, 6), (16, 64), (129, 34), (200, 258), (80, 1024), (240, 1026), (15, 2050)],
)
def test_products_equal_float32_products_rounded_once(kernels, num_rows, out_features, in_features):
    weight, x, bias = random(out_features, in_features), random(num_rows, in_features, seed=1), random(out_features)
    matrix = PanelMatrix(weight, kernels)
    for added in (None, bias):
        expected = torch.nn.functional.linear(x.double(), weight.double(), None if added is None else added.double())
        out = matrix(x, added)
        assert out.dtype is torch.bfloat16
        # Half a unit in the result's last place, and float32 rounding of terms that may cancel.
        torch.testing.assert_close(out.double(), expected, rtol=2**-8, atol=1e-4)


@pytest.mark.covering
@needs_kernels
@pytest.mark.parametrize("num_rows", [0, 1, 5, 6, 7, 19, 193])
@pytest.mark.parametrize(("num_gates", "in_features"), [(16, 6), (32, 64), (48, 34), (96, 1026)])
@pytest.mark.parametrize("hidden_act", ["silu", "gelu_pytorch_tanh"])
def test_gates_equal_activated_rounded_products(kernels, num_rows, num_gates, in_features, hidden_act):
    weight, x, bias = random(2 * num_gates, in_features), random(num_rows, in_features, seed=1), random(2 * num_gates)
    gates = PanelGates(weight, kernels, hidden_act)
    assert torch.equal(gates.plain(), weight)
    for added in (None, bias):
        product = gates(x, added)
        assert torch.equal(product, PanelMatrix(weight, kernels)(x, added))
        expected = activated(product, hidden_act)
        out = gates.act_and_mul(x, added)
        assert out.shape == (num_rows, num_gates)
        # The activation may be rounded the other way by one unit in the last place, and so may the product.
        torch.testing.assert_close(out, expected, rtol=2**-6, atol=1e-6)


@needs_kernels
@pytest.mark.parametrize("hidden_act", ["silu", "gelu_pytorch_tanh"])
def test_extreme_gates_are_activated_correctly(kernels, hidden_act):
    weight = torch.eye(32, 2).bfloat16()  # row 0 is the gate of row 16
    weight[16, 1] = 1
    values = [0.0, -0.0, 3e38, -3e38, 90.0, -90.0, -12.5, 1e-30, torch.inf, torch.nan]
    x = torch.tensor([[value, 2.0] for value in values]).bfloat16()
    gates = PanelGates(weight, kernels, hidden_act)
    out, expected = gates.act_and_mul(x)[:, 0], activated(gates(x), hidden_act)[:, 0]
    torch.testing.assert_close(out, expected, rtol=2**-6, atol=1e-6, equal_nan=True)


@needs_kernels
@pytest.mark.parametrize(
    ("weight", "hidden_act"),
    [(torch.zeros(24, 4), "silu"), (torch.zeros(32, 4).bfloat16(), "relu"), (torch.zeros(24, 4).bfloat16(), "silu")],
    ids=["float32", "another activation", "gates that fill no vector"],
)
def test_unsupported_gates_are_refused(kernels, weight, hidden_act):
    assert not PanelGates.can_activate(weight, hidden_act)
    with pytest.raises(InvariantError, match="no kernels"):
        PanelGates(weight, kernels, hidden_act)


@needs_kernels
def test_an_adapter_changes_gates_before_their_activation(kernel_cache):
    layer = GatedLinear(8, {"gate_up_proj": 32}, "silu", device=torch.device("cpu"), dtype=torch.bfloat16)
    layer.weight.copy_(random(32, 8))
    x = random(3, 8, seed=1)
    plain = layer(x)
    layer.use_ops(NativeOps.load("g++", kernel_cache))
    layer.pack()
    torch.testing.assert_close(layer(x), plain, rtol=2**-6, atol=1e-6)
    layer.adapt(lambda x, out: out.mul_(0.5))
    halved = torch.nn.functional.linear(x, random(32, 8)) * 0.5
    torch.testing.assert_close(layer(x), activated(halved, "silu"), rtol=2**-6, atol=1e-6)


@needs_kernels
@pytest.mark.parametrize("shape", [(64, 32), (15, 6), (129, 34)])
def test_the_original_weight_can_be_restored(kernels, shape):
    weight = random(*shape)
    assert torch.equal(PanelMatrix(weight, kernels).plain(), weight)


@needs_kernels
def test_the_weight_may_be_overwritten_after_packing(kernels):
    weight, x = random(40, 8), random(3, 8, seed=1)
    matrix = PanelMatrix(weight, kernels)
    before = matrix(x)
    weight.zero_()
    assert torch.equal(matrix(x), before)


@needs_kernels
def test_a_row_does_not_depend_on_other_rows(kernels):
    weight, x = random(100, 64), random(30, 64, seed=1)
    matrix = PanelMatrix(weight, kernels)
    together, alone = matrix(x), torch.cat([matrix(row[None]) for row in x])
    torch.testing.assert_close(together, alone, rtol=2**-7, atol=1e-5)


@needs_kernels
def test_strided_and_nested_activations_are_multiplied_in_place(kernels):
    matrix, x = PanelMatrix(random(20, 8), kernels), random(2, 3, 16, seed=1)
    torch.testing.assert_close(matrix(x[..., ::2]), matrix(x[..., ::2].contiguous()))
    assert matrix(x[..., :8]).shape == (2, 3, 20)


@needs_kernels
def test_a_strided_bias_is_added_in_place(kernels):
    matrix, x, bias = PanelMatrix(random(20, 8), kernels), random(3, 8, seed=1), random(40)[::2]
    assert torch.equal(matrix(x, bias), matrix(x, bias.clone()))


@needs_kernels
@pytest.mark.parametrize("num_rows", [2, 20, 40])
def test_nan_stays_in_its_row(kernels, num_rows):
    matrix = PanelMatrix(torch.ones(17, 4, dtype=torch.bfloat16), kernels)
    x = torch.ones(num_rows, 4, dtype=torch.bfloat16)
    x[1, 1] = torch.nan
    out = matrix(x)
    assert out[1].isnan().all()
    assert (out[torch.arange(num_rows) != 1] == 4).all()


@needs_kernels
@pytest.mark.parametrize(
    ("x", "bias"),
    [
        (torch.zeros(2, 6, dtype=torch.bfloat16), None),
        (torch.zeros(2, 8), None),
        (torch.zeros(2, 8, dtype=torch.bfloat16), torch.zeros(19, dtype=torch.bfloat16)),
        (torch.zeros(2, 8, dtype=torch.bfloat16), torch.zeros(20)),
    ],
    ids=["features", "dtype", "bias", "bias's dtype"],
)
def test_wrong_arguments_are_an_error(kernels, x, bias):
    with pytest.raises(InvariantError, match="expected"):
        PanelMatrix(random(20, 8), kernels)(x, bias)


@needs_kernels
@pytest.mark.parametrize("weight", [torch.zeros(4, 3).bfloat16(), torch.zeros(4, 4), torch.zeros(4).bfloat16()])
def test_unsupported_weights_are_refused(kernels, weight):
    assert not PanelMatrix.can_hold(weight)
    with pytest.raises(InvariantError, match="panels hold"):
        PanelMatrix(weight, kernels)


def test_a_cpu_without_the_instructions_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    with pytest.raises(ProviderUnavailableError, match="AVX512-BF16"):
        PanelKernels.load("g++", tmp_path)


@needs_kernels
def test_amx_is_used_if_the_operating_system_permits_it(monkeypatch, kernel_cache):
    """Vector kernels use panels of 64 rows; AMX kernels use panels of 32 rows and 32 inputs."""
    if not HAS_MATRIX_UNITS:  # torch reports AMX here, but the kernels check it themselves
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    kernels = PanelKernels.load("g++", kernel_cache)
    assert kernels.size(1, 2) == (1024 if HAS_MATRIX_UNITS else 32)
    assert PanelKernels.load("g++", kernel_cache, use_matrix_units=False).size(1, 2) == 32
