"""Token masks of the compiled kernel, compared with numpy."""

import numpy as np
import pytest
import torch

from graftlm.errors import InvariantError
from graftlm.execution.native_masks import NativeMasks
from graftlm.execution.token_masks import forbid


@pytest.fixture(scope="module")
def native(kernel_cache):
    return NativeMasks.load("g++", kernel_cache)


@pytest.mark.parametrize("rows", [[0, 1, 2, 3, 4], [4, 0], [2], []])
@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 1000, 20_000])
@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.99, 1.0])
def test_the_kernel_writes_the_same_as_numpy(native, vocab_size, rows, share):
    draw = np.random.default_rng(vocab_size)
    allowed = draw.random((len(rows), -(-vocab_size // 32) * 32)) < share
    bits = np.packbits(allowed, axis=1, bitorder="little").view(np.int32)
    scores = torch.randn(5, vocab_size, generator=torch.Generator().manual_seed(0))
    scores[:, ::7] = torch.nan
    expected = scores.clone()
    order = np.argsort(rows)  # numpy's version takes ascending rows
    forbid(expected, np.array(rows, dtype=np.int64)[order], bits[order])
    native.forbid(scores, np.array(rows, dtype=np.int64), bits)
    torch.testing.assert_close(scores, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("scores", "rows", "bits"),
    [
        (torch.zeros(2, 40, dtype=torch.bfloat16), [0], np.zeros((1, 2), np.int32)),
        (torch.zeros(2, 80)[:, :40], [0], np.zeros((1, 2), np.int32)),
        (torch.zeros(2, 40), [2], np.zeros((1, 2), np.int32)),
        (torch.zeros(2, 40), [-1], np.zeros((1, 2), np.int32)),
        (torch.zeros(2, 40), [0], np.zeros((1, 1), np.int32)),
        (torch.zeros(2, 40), [0, 1], np.zeros((1, 2), np.int32)),
        (torch.zeros(2, 40), [0], np.zeros((1, 2), np.int64)),
    ],
    ids=["bfloat16", "strided", "no such row", "row before the first", "few words", "few masks", "long words"],
)
def test_wrong_arguments_are_refused(native, scores, rows, bits):
    with pytest.raises(InvariantError, match="contiguous float32 scores"):
        native.forbid(scores, np.array(rows), bits)


def test_without_a_compiler_numpy_is_used(tmp_path, caplog):
    with caplog.at_level("INFO", logger="graftlm"):
        assert NativeMasks.load("no-such-compiler", tmp_path) is None
    assert "token masks use numpy" in caplog.text
