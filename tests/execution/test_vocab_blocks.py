import pytest
import torch

from graftlm.execution.vocab_blocks import draw, most_likely, num_noise

SIZES = [1, 5, 127, 128, 129, 1000, 1280]


@pytest.mark.parametrize("vocab_size", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_most_likely_token_is_the_column_of_the_maximum(vocab_size, dtype):
    x = torch.randn(17, vocab_size, generator=torch.Generator().manual_seed(0)).to(dtype)
    columns, is_bad = most_likely(x)
    assert columns.dtype == torch.int64
    assert torch.equal(x.gather(1, columns[:, None]).squeeze(1), x.max(dim=1).values)
    assert not is_bad.any()


def test_the_first_of_equal_maxima_is_returned():
    x = torch.zeros(1, 1000)
    x[0, [130, 140, 700]] = 1.0
    assert most_likely(x)[0].item() == 130


@pytest.mark.parametrize("bad_column", [0, 129, 999])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_non_finite_number_is_reported_with_a_valid_column(bad_column, bad):
    x = torch.zeros(2, 1000)
    x[1, bad_column] = bad
    columns, is_bad = most_likely(x)
    assert is_bad.tolist() == [False, True]
    assert 0 <= int(columns[1]) < 1000


def test_a_row_without_a_finite_number_is_reported():
    assert most_likely(torch.full((1, 40), -torch.inf))[1].tolist() == [True]


def test_the_maximum_is_read_from_a_slice_of_a_wider_tensor():
    wide = torch.randn(4, 600, generator=torch.Generator().manual_seed(0))
    assert torch.equal(most_likely(wide[:, :500])[0], wide[:, :500].argmax(dim=1))


def noise_for(num_rows, vocab_size, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.empty(num_rows, num_noise(vocab_size), dtype=torch.float64).exponential_(generator=generator)


@pytest.mark.parametrize(
    "vocab_size", [128, 300, *(pytest.param(n, marks=pytest.mark.full) for n in SIZES if n != 128)]
)
def test_columns_are_drawn_in_proportion_to_their_weights(vocab_size):
    n = 60_000
    weights = torch.rand(vocab_size, generator=torch.Generator().manual_seed(1)) ** 8  # from low to high weights
    weights[::3] = 0.0
    weights[-1] += 0.5
    drawn = draw(weights.expand(n, -1), noise_for(n, vocab_size))
    counts = torch.bincount(drawn, minlength=vocab_size).double()
    assert counts[weights == 0].sum() == 0
    expected = n * weights.double() / weights.double().sum()
    often = expected > 5
    chi_square = (((counts - expected) ** 2) / expected)[often].sum().item()
    freedom = max(1, int(often.sum()) - 1)
    assert chi_square < freedom + 5 * (2 * freedom) ** 0.5


@pytest.mark.parametrize("vocab_size", [3, 128, 300, 32000])
def test_a_column_of_weight_zero_is_never_drawn(vocab_size):
    generator = torch.Generator().manual_seed(2)
    weights = torch.rand(64, vocab_size, generator=generator) * 10.0 ** -torch.arange(64)[:, None].clamp(max=35)
    weights[:, 0] = 0.0
    weights[:, -1] = 0.0
    weights[torch.rand(64, vocab_size, generator=generator) < 0.9] = 0.0
    weights[:, vocab_size // 2] = 1e-30
    drawn = draw(weights, noise_for(64, vocab_size))
    assert (weights.gather(1, drawn[:, None]) > 0).all()


def test_the_draw_of_a_row_does_not_depend_on_the_batch():
    weights = torch.rand(64, 5000, generator=torch.Generator().manual_seed(3))
    noise = noise_for(64, 5000)
    alone = torch.cat([draw(weights[i : i + 1], noise[i : i + 1]) for i in range(64)])
    assert torch.equal(draw(weights, noise), alone)


def test_rounding_of_the_weights_almost_never_changes_a_draw():
    n, generator = 20_000, torch.Generator().manual_seed(4)
    weights = torch.softmax(torch.randn(n, 2000, generator=generator) * 4, dim=1)
    rounded = weights * (1 + 2e-6 * torch.randn(n, 2000, generator=generator))
    noise = noise_for(n, 2000)
    assert (draw(weights, noise) != draw(rounded, noise)).sum() <= 3


def test_a_draw_from_nan_or_zero_weights_stays_inside_the_vocabulary():
    for value in (torch.nan, 0.0):
        weights = torch.full((1, 300), value)
        assert 0 <= draw(weights, noise_for(1, 300)).item() < 300
