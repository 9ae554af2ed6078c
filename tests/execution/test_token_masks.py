import numpy as np
import pytest
import torch

from graftlm.execution.token_masks import forbid


def pack(*rows, vocab_size):
    """Return masks that allow some tokens, int32 [n, ceil(V / 32)]."""
    bits = np.zeros((len(rows), -(-vocab_size // 32) * 32), dtype=np.uint8)
    for row, tokens in enumerate(rows):
        bits[row, list(tokens)] = 1
    return np.packbits(bits, axis=1, bitorder="little").view(np.int32)


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 300])
def test_bit_i_of_word_w_is_token_32_times_w_plus_i(vocab_size):
    draw = np.random.default_rng(vocab_size)
    allowed = draw.random((3, vocab_size)) < 0.5
    rows = [np.flatnonzero(row) for row in allowed]
    scores = torch.zeros(3, vocab_size)
    forbid(scores, np.arange(3), pack(*rows, vocab_size=vocab_size))
    assert np.array_equal(scores.isfinite().numpy(), allowed)


def test_the_sign_bit_is_token_31():
    scores = torch.zeros(1, 32)
    forbid(scores, np.array([0]), np.array([[-(2**31)]], dtype=np.int32))
    assert scores[0].isfinite().nonzero().flatten().tolist() == [31]


def test_only_the_given_rows_change():
    scores = torch.randn(4, 40)
    before = scores.clone()
    forbid(scores, np.array([1, 3]), pack([0, 39], [5], vocab_size=40))
    assert torch.equal(scores[[0, 2]], before[[0, 2]])
    assert scores[1].isfinite().nonzero().flatten().tolist() == [0, 39]
    assert scores[3].isfinite().nonzero().flatten().tolist() == [5]
    assert torch.equal(scores[3, 5], before[3, 5])


def test_a_row_without_allowed_finite_scores_uses_the_fallback_scores():
    scores = torch.tensor([[1.0, 2.0, -torch.inf, -torch.inf], [1.0, 2.0, 3.0, 4.0]])
    fallback = torch.tensor([[9.0, 9.0, 7.0, 8.0], [9.0, 9.0, 9.0, 9.0]], dtype=torch.bfloat16)
    forbid(scores, np.array([0, 1]), pack([2, 3], [1, 2], vocab_size=4), fallback)
    inf = torch.inf
    assert scores.tolist() == [[-inf, -inf, 7.0, 8.0], [-inf, 2.0, 3.0, -inf]]


def test_nan_is_kept_where_the_token_is_allowed():
    scores = torch.tensor([[torch.nan, torch.nan, 1.0]])
    forbid(scores, np.array([0]), pack([0, 2], vocab_size=3), torch.zeros(1, 3))
    assert scores[0, 0].isnan()
    assert scores[0, 1] == -torch.inf


@pytest.mark.parametrize("rows", [[0, 1, 2, 3, 4], [0, 4], [2], []])
@pytest.mark.parametrize("vocab_size", [1, 33, 1000])
@pytest.mark.parametrize("share", [0.01, 0.5, 0.99])
def test_forbidden_scores_become_minus_infinity_and_others_are_unchanged(vocab_size, rows, share):
    draw = np.random.default_rng(vocab_size)
    allowed = draw.random((len(rows), vocab_size)) < share
    bits = pack(*[np.flatnonzero(row) for row in allowed], vocab_size=vocab_size)
    wide = torch.randn(5, vocab_size + 7)
    before = wide.clone()
    forbid(wide[:, 3 : 3 + vocab_size], np.array(rows, dtype=np.int64), bits)
    before[:, 3 : 3 + vocab_size][rows] = before[:, 3 : 3 + vocab_size][rows].masked_fill(
        torch.from_numpy(~allowed), -torch.inf
    )
    assert torch.equal(wide, before)


def test_the_fallback_scores_are_not_changed():
    fallback = torch.tensor([[1.0, 2.0, 3.0]])
    scores = torch.tensor([[0.0, -torch.inf, 0.0]])
    forbid(scores, np.array([0]), pack([1], vocab_size=3), fallback)
    assert scores.tolist() == [[-torch.inf, 2.0, -torch.inf]]
    assert fallback.tolist() == [[1.0, 2.0, 3.0]]
