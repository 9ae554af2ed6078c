"""Tokens sampled by the compiled kernels, compared with torch's operations."""

import numpy as np
import pytest
import torch

from graftlm.errors import InvariantError
from graftlm.execution.native_sampling import DrawSettings, NativeSampling
from graftlm.execution.noise import exponential, noise_keys
from graftlm.execution.sampling_filters import keep_min_p, keep_top_k, keep_top_p
from graftlm.execution.vocab_blocks import draw, most_likely, num_noise

SIZES = [1, 2, 15, 16, 17, 127, 128, 129, 300, 4096, 5001]
NO_TOP_K = np.iinfo(np.int64).max


@pytest.fixture(scope="module")
def native(kernel_cache):
    return NativeSampling.load("g++", kernel_cache)


def logits_of(num_rows, vocab_size, dtype=torch.float32, seed=0, scale=3.0):
    return (torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def settings_for(num_rows, temperature=1.0, top_k=NO_TOP_K, top_p=1.0, min_p=0.0, seed=0):
    keys = noise_keys(np.arange(num_rows, dtype=np.uint64) + np.uint64(seed), np.full(num_rows, 3))
    full = [np.full(num_rows, value, dtype=np.float64) for value in (temperature, top_p, min_p)]
    return DrawSettings(full[0], np.full(num_rows, top_k), full[1], full[2], keys)


def kept(logits, settings):
    """Return the probabilities that torch's filters keep, before they are normalised again."""
    filtered = keep_top_k(logits.float(), settings.top_k)
    probs = torch.softmax(filtered / torch.from_numpy(settings.temperature).float()[:, None], dim=1)
    return keep_min_p(keep_top_p(probs, settings.top_p), settings.min_p)


def drawn_by_torch(logits, settings):
    probs = kept(logits, settings)
    return draw(probs, exponential(torch.from_numpy(settings.keys), num_noise(logits.shape[1])))


FILTERS = [
    {},
    {"temperature": 0.3},
    {"temperature": 5.0},
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 200},
    {"top_p": 0.001},
    {"top_p": 0.5},
    {"top_p": 0.95},
    {"top_p": 0.9999999},
    {"min_p": 0.02},
    {"min_p": 1.0},
    {"temperature": 0.7, "top_k": 40, "top_p": 0.9, "min_p": 0.01},
]


@pytest.mark.covering
@pytest.mark.parametrize("filters", FILTERS, ids=str)
@pytest.mark.parametrize("vocab_size", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_draws_the_same_tokens_as_torch(native, dtype, vocab_size, filters):
    num_rows = 64
    for seed, scale in ((0, 3.0), (1, 0.1)):  # a few likely tokens, and nearly equal tokens
        logits = logits_of(num_rows, vocab_size, dtype, seed, scale)
        settings = settings_for(num_rows, **filters, seed=1000 * seed)
        drawn = native.draw(logits, np.arange(num_rows), settings)
        # A draw may differ where a sum is rounded differently, which happens about once in a million draws.
        assert int((drawn != drawn_by_torch(logits, settings)).sum()) <= 1


@pytest.mark.parametrize("filters", FILTERS, ids=str)
@pytest.mark.parametrize("vocab_size", [300, 5001])
def test_only_tokens_that_the_filters_keep_are_drawn_and_all_of_them(native, vocab_size, filters):
    logits = logits_of(1, vocab_size, torch.bfloat16, seed=4)
    row = np.zeros(4000, dtype=np.int64)
    drawn = native.draw(logits, row, settings_for(len(row), **filters))
    likely = kept(logits, settings_for(1, **filters))[0]
    assert (likely[drawn] > 0).all()
    often = (likely / likely.sum() > 0.01).nonzero().flatten().tolist()
    assert set(often) <= set(drawn.tolist())


def test_ties_with_the_last_kept_token_are_kept(native):
    logits = torch.zeros(1, 400)
    logits[0, :100] = 2.0
    row = np.zeros(4000, dtype=np.int64)
    for filters in ({"top_k": 3}, {"top_p": 0.02}, {"min_p": 1.0}):
        assert len(set(native.draw(logits, row, settings_for(len(row), **filters)).tolist())) == 100


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_tokens_with_logit_minus_infinity_are_never_drawn(native, filters):
    logits = torch.full((32, 1000), -torch.inf)
    allowed = torch.randint(1000, (32, 5), generator=torch.Generator().manual_seed(0))
    logits.scatter_(1, allowed, logits_of(32, 5))
    drawn = native.draw(logits, np.arange(32), settings_for(32, **filters))
    assert (drawn[:, None] == allowed).any(dim=1).all()


@pytest.mark.parametrize("temperature", [1e-6, 1e6])
@pytest.mark.parametrize("largest", [3e38, 100.0, 1e-30])
def test_extreme_logits_and_temperatures(native, temperature, largest):
    logits = torch.full((8, 300), -largest)
    logits[:, 123] = largest
    drawn = native.draw(logits, np.arange(8), settings_for(8, temperature=temperature, top_p=0.9))
    assert ((drawn >= 0) & (drawn < 300)).all()
    if largest >= 100.0 and temperature < 1.0:
        assert (drawn == 123).all()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, "nothing"])
def test_a_row_with_bad_logits_does_not_affect_other_rows(native, bad):
    logits = logits_of(3, 700)
    expected = native.draw(logits, np.arange(3), settings_for(3, top_k=50, top_p=0.9))
    logits[1, 250:] = torch.nan if bad == "nothing" else bad
    logits[1, :250] = -torch.inf if bad == "nothing" else 0.0
    if bad == "nothing":
        logits[1] = -torch.inf
    drawn = native.draw(logits, np.arange(3), settings_for(3, top_k=50, top_p=0.9))
    assert drawn[[0, 2]].tolist() == expected[[0, 2]].tolist()
    assert 0 <= int(drawn[1]) < 700


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", SIZES)
def test_the_most_likely_tokens_equal_those_of_numpy(native, dtype, vocab_size):
    logits = logits_of(40, vocab_size, dtype, scale=1.0)  # in bfloat16 many values are equal
    logits[1, vocab_size // 2] = torch.nan
    logits[2] = -torch.inf
    logits[3, -1] = torch.inf
    logits[4] = torch.nan
    logits[5, 0] = -torch.inf
    for found, expected in zip(native.most_likely(logits), most_likely(logits), strict=True):
        assert torch.equal(found, expected)


def test_rows_are_read_in_place_with_any_stride(native):
    wide = logits_of(200, 600)  # enough rows for two threads
    part = wide[:, 100:500]
    assert torch.equal(native.most_likely(part)[0], part.argmax(dim=1))
    rows, settings = np.array([150, 3, 77]), settings_for(3, top_p=0.8)
    assert torch.equal(native.draw(part, rows, settings), drawn_by_torch(part[torch.from_numpy(rows)], settings))
    one = wide[:1].expand(50, -1)
    assert native.most_likely(one)[0].tolist() == 50 * [int(wide[0].argmax())]


def test_the_draw_of_a_row_does_not_depend_on_other_rows(native):
    logits, settings = logits_of(300, 2000), settings_for(300, top_k=100, top_p=0.9)
    together = native.draw(logits, np.arange(300), settings)
    for i in (0, 17, 299):
        columns = (settings.temperature, settings.top_k, settings.top_p, settings.min_p, settings.keys)
        alone = native.draw(logits, np.array([i]), DrawSettings(*[column[i : i + 1] for column in columns]))
        assert int(alone) == int(together[i])


def test_no_rows_give_no_tokens(native):
    assert native.draw(logits_of(2, 50), np.arange(0), settings_for(0)).tolist() == []
    assert [len(part) for part in native.most_likely(logits_of(0, 50))] == [0, 0]


@pytest.mark.parametrize(
    ("logits", "rows", "settings"),
    [
        (torch.zeros(2, 40, dtype=torch.float16), [0], settings_for(1)),
        (torch.zeros(40, 2).T, [0], settings_for(1)),
        (torch.zeros(2, 0), [0], settings_for(1)),
        (torch.zeros(2, 40), [2], settings_for(1)),
        (torch.zeros(2, 40), [-1], settings_for(1)),
        (torch.zeros(2, 40), [0], settings_for(2)),
        (torch.zeros(2, 40), [0], settings_for(1, top_k=0)),
    ],
    ids=["float16", "columns apart", "no columns", "no such row", "row before the first", "more settings", "top_k 0"],
)
def test_wrong_arguments_are_refused(native, logits, rows, settings):
    with pytest.raises(InvariantError, match="expected"):
        native.draw(logits, np.array(rows), settings)


def test_without_a_compiler_torch_is_used(tmp_path, caplog):
    with caplog.at_level("INFO", logger="graftlm"):
        assert NativeSampling.load("no-such-compiler", tmp_path) is None
    assert "sampling uses torch's operations" in caplog.text
