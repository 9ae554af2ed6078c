import pytest
import torch

from graftlm.contracts import LinearLayer, Platform
from graftlm_quantization import Fp8Options, provide_quantizations
from graftlm_quantization.fp8 import Fp8, Fp8Linear, Fp8Rows, multiply_by_gpu, multiply_in_float32

PROVIDER = next(provider for provider in provide_quantizations() if provider.name == "fp8")
SEED = torch.Generator().manual_seed(8)


def draw(*size):
    return torch.randn(*size, generator=SEED)


def test_each_row_uses_the_largest_code_and_errors_are_at_most_a_sixteenth():
    rows = draw(20, 64) * torch.logspace(-20, 20, 20)[:, None]
    encoded = Fp8Rows.encode(rows)
    assert encoded.codes.float().abs().amax(dim=1).unique().tolist() == [448.0]
    least = 2.0**-10 * encoded.scales  # half of the smallest code
    assert bool(((encoded.decoded() - rows).abs() <= rows.abs() / 16 + least).all())


@pytest.mark.parametrize(("value", "expected"), [(0.0, 0.0), (-3.5, -3.5), (float("nan"), None)])
def test_constant_rows_are_exact_and_nan_stays_nan(value, expected):
    decoded = Fp8Rows.encode(torch.full((2, 16), value)).decoded()
    if expected is None:
        assert decoded.isnan().all()
    else:
        torch.testing.assert_close(decoded, torch.full((2, 16), expected))


def test_a_tokens_scale_does_not_depend_on_other_tokens():
    kernel = Fp8Linear(Fp8Rows.encode(draw(32, 64)), None, multiply_in_float32)
    x = draw(5, 64).bfloat16()
    x[1] *= 1e4
    together = kernel(x)
    assert torch.equal(together, torch.cat([kernel(row[None]) for row in x]))


@pytest.mark.parametrize(
    ("layer", "obstacle"),
    [
        (LinearLayer("layers.0.mlp.down", ("down_proj",), 64, 32), None),
        (LinearLayer("lm_head", ("lm_head",), 64, 32), "option keep names lm_head"),
        (LinearLayer("a", ("down_proj",), 72, 32), "its sizes, 32 x 72, are not multiples of 16"),
        (LinearLayer("a", ("down_proj",), 64, 40), "its sizes, 40 x 64, are not multiples of 16"),
    ],
)
def test_unsupported_layers_are_not_quantized(layer, obstacle):
    assert Fp8(Fp8Options(), multiply_in_float32).obstacle(layer) == obstacle


@pytest.mark.parametrize(
    ("platform", "reason"),
    [
        (Platform("cuda", (9, 0)), None),
        (Platform("cuda", (8, 9)), None),
        (Platform("cuda", (8, 6)), "it needs compute capability 8.9 (Ada) or later, this device has 8.6"),
        (Platform("cpu"), "its products run on a CUDA device; this device is 'cpu'; int8 and int4 run on a CPU"),
    ],
)
def test_the_reason_why_fp8_cannot_run_is_reported(platform, reason):
    assert PROVIDER.unavailable(platform) == reason


NEEDS_DEVICE = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9),
    reason="needs a CUDA device that multiplies fp8",
)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NEEDS_DEVICE])])
@pytest.mark.parametrize(("m", "n", "k"), [(1, 32, 64), (7, 128, 256), (256, 512, 512)])
def test_the_product_equals_the_one_in_float32(m, n, k, device):
    x, weight = Fp8Rows.encode(draw(m, k).to(device)), Fp8Rows.encode(draw(n, k).to(device))
    expected = multiply_in_float32(x, weight).float()
    error = (multiply_by_gpu(x, weight).float() - expected).abs().max() / expected.abs().max()
    assert error < 0.01  # roundings to bfloat16, and sums that the hardware keeps in fewer bits
