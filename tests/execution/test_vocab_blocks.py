import pytest
import torch

from graftlm.execution.vocab_blocks import argmax, inverse_cdf

SIZES = [1, 5, 127, 128, 129, 1000, 1280]


@pytest.mark.parametrize("vocab_size", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_argmax_finds_the_largest_value_and_its_column(vocab_size, dtype):
    x = torch.randn(17, vocab_size, generator=torch.Generator().manual_seed(0)).to(dtype)
    values, columns = argmax(x)
    assert values.dtype == dtype
    assert torch.equal(values, x.max(dim=1).values)
    assert torch.equal(x.gather(1, columns[:, None]).squeeze(1), values)


def test_argmax_takes_the_first_of_equals():
    x = torch.zeros(1, 1000)
    x[0, [130, 140, 700]] = 1.0
    assert argmax(x)[1].item() == 130


@pytest.mark.parametrize("bad_column", [0, 129, 999])
def test_argmax_reports_nan_with_a_column_inside_the_vocabulary(bad_column):
    x = torch.zeros(2, 1000)
    x[1, bad_column] = torch.nan
    values, columns = argmax(x)
    assert values.isnan().tolist() == [False, True]
    assert 0 <= int(columns[1]) < 1000


def test_argmax_reads_a_slice_of_a_wider_tensor():
    wide = torch.randn(4, 600, generator=torch.Generator().manual_seed(0))
    assert torch.equal(argmax(wide[:, :500])[1], wide[:, :500].argmax(dim=1))


@pytest.mark.parametrize("vocab_size", SIZES)
def test_inverse_cdf_is_the_inverse_of_the_cumulative_sum(vocab_size):
    generator = torch.Generator().manual_seed(1)
    weights = torch.rand(64, vocab_size, generator=generator)
    weights[:, ::3] = 0.0
    weights[:, -1] += 0.5
    u = torch.rand(64, generator=generator, dtype=torch.float64)
    ends = weights.double().cumsum(dim=1)
    expected = torch.searchsorted(ends, (u * ends[:, -1])[:, None], right=True).squeeze(1)
    assert torch.equal(inverse_cdf(weights, u), expected)


@pytest.mark.parametrize("vocab_size", [3, 128, 300, 32000])
@pytest.mark.parametrize("u", [0.0, 0.5, 1.0 - 2.0**-53])
def test_inverse_cdf_never_draws_a_column_of_weight_zero(vocab_size, u):
    generator = torch.Generator().manual_seed(2)
    weights = torch.rand(32, vocab_size, generator=generator) * 10.0 ** -torch.arange(32)[:, None]
    weights[:, 0] = 0.0
    weights[:, -1] = 0.0
    weights[torch.rand(32, vocab_size, generator=generator) < 0.9] = 0.0
    weights[:, vocab_size // 2] = 1e-30
    drawn = inverse_cdf(weights, torch.full((32,), u, dtype=torch.float64))
    assert (weights.gather(1, drawn[:, None]) > 0).all()


def test_inverse_cdf_of_a_row_does_not_depend_on_the_batch():
    generator = torch.Generator().manual_seed(3)
    weights = torch.rand(64, 5000, generator=generator)
    u = torch.rand(64, generator=generator, dtype=torch.float64)
    alone = torch.cat([inverse_cdf(weights[i : i + 1], u[i : i + 1]) for i in range(64)])
    assert torch.equal(inverse_cdf(weights, u), alone)


def test_inverse_cdf_of_nan_stays_inside_the_vocabulary():
    weights = torch.full((1, 300), torch.nan)
    assert 0 <= inverse_cdf(weights, torch.tensor([0.7], dtype=torch.float64)).item() < 300
