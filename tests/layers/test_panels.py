"""Products with matrices in panels against float32 ones, at every shape that takes another way through the kernel."""

import pytest
import torch

from graftlm.errors import InvariantError, ProviderUnavailableError
from graftlm.layers.panels import PanelKernels, PanelMatrix

HAS_KERNELS = torch.cpu._is_avx512_bf16_supported() and not torch.cpu._is_amx_tile_supported()
needs_kernels = pytest.mark.skipif(not HAS_KERNELS, reason="the kernels gain only on CPUs with AVX512-BF16 without AMX")


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    return PanelKernels.load("g++", tmp_path_factory.mktemp("kernels") / "cache")


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


@needs_kernels
@pytest.mark.parametrize("num_rows", [0, 1, 2, 3, 4, 5, 6, 7, 11, 12, 13, 19, 25, 191, 192, 193, 400])
@pytest.mark.parametrize(
    ("out_features", "in_features"),
    [(64, 32), (1, 2), (15, 6), (16, 64), (129, 34), (200, 258), (80, 1024), (240, 1026), (15, 2050)],
)
def test_products_are_those_of_float32_rounded_once(kernels, num_rows, out_features, in_features):
    weight, x, bias = random(out_features, in_features), random(num_rows, in_features, seed=1), random(out_features)
    matrix = PanelMatrix(weight, kernels)
    for added in (None, bias):
        expected = torch.nn.functional.linear(x.double(), weight.double(), None if added is None else added.double())
        out = matrix(x, added)
        assert out.dtype is torch.bfloat16
        # Half a unit of the result's last place, and float32's rounding of terms that may cancel.
        torch.testing.assert_close(out.double(), expected, rtol=2**-8, atol=1e-4)


@needs_kernels
@pytest.mark.parametrize("shape", [(64, 32), (15, 6), (129, 34)])
def test_the_weight_comes_back_as_it_was(kernels, shape):
    weight = random(*shape)
    assert torch.equal(PanelMatrix(weight, kernels).plain(), weight)


@needs_kernels
def test_the_weight_may_be_overwritten_once_it_is_arranged(kernels):
    weight, x = random(40, 8), random(3, 8, seed=1)
    matrix = PanelMatrix(weight, kernels)
    before = matrix(x)
    weight.zero_()
    assert torch.equal(matrix(x), before)


@needs_kernels
def test_rows_do_not_depend_on_the_rows_beside_them(kernels):
    weight, x = random(100, 64), random(30, 64, seed=1)
    matrix = PanelMatrix(weight, kernels)
    together, alone = matrix(x), torch.cat([matrix(row[None]) for row in x])
    torch.testing.assert_close(together, alone, rtol=2**-7, atol=1e-5)


@needs_kernels
def test_strided_and_deep_activations_are_multiplied_as_they_stand(kernels):
    matrix, x = PanelMatrix(random(20, 8), kernels), random(2, 3, 16, seed=1)
    torch.testing.assert_close(matrix(x[..., ::2]), matrix(x[..., ::2].contiguous()))
    assert matrix(x[..., :8]).shape == (2, 3, 20)


@needs_kernels
def test_numbers_that_are_none_stay_so(kernels):
    matrix, x = PanelMatrix(torch.ones(17, 4, dtype=torch.bfloat16), kernels), torch.ones(2, 4, dtype=torch.bfloat16)
    x[0, 1] = torch.nan
    out = matrix(x)
    assert out[0].isnan().all()
    assert (out[1] == 4).all()


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
def test_what_does_not_fit_is_an_error(kernels, x, bias):
    with pytest.raises(InvariantError, match="expected"):
        PanelMatrix(random(20, 8), kernels)(x, bias)


@needs_kernels
@pytest.mark.parametrize("weight", [torch.zeros(4, 3).bfloat16(), torch.zeros(4, 4), torch.zeros(4).bfloat16()])
def test_other_weights_are_refused(kernels, weight):
    assert not PanelMatrix.can_hold(weight)
    with pytest.raises(InvariantError, match="panels hold"):
        PanelMatrix(weight, kernels)


@pytest.mark.parametrize(
    ("function", "answer", "said"),
    [("_is_amx_tile_supported", True, "AMX"), ("_is_avx512_bf16_supported", False, "AVX512-BF16")],
)
def test_cpus_that_gain_nothing_are_told(monkeypatch, tmp_path, function, answer, said):
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    monkeypatch.setattr(torch.cpu, function, lambda: answer)
    with pytest.raises(ProviderUnavailableError, match=said):
        PanelKernels.load("g++", tmp_path)
