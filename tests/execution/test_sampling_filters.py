import numpy as np
import pytest
import torch
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from graftlm.execution.sampling_filters import keep_min_p, keep_top_k, keep_top_p

SCALES = [0.1, 1.0, 4.0]


def _logits(scale, rows=8, vocab_size=1000):
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(0)) * scale


def _kept_by_hf(warper, logits):
    return warper(None, logits).isfinite()


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("k", [1, 2, 50, 999, 1000, 5000])
def test_top_k_keeps_the_same_tokens_as_hugging_face(scale, k):
    logits = _logits(scale)
    kept = keep_top_k(logits, np.full(8, k))
    assert torch.equal(kept.isfinite(), _kept_by_hf(TopKLogitsWarper(k), logits))
    assert torch.equal(kept[kept.isfinite()], logits[kept.isfinite()])


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("p", [1e-6, 0.1, 0.5, 0.9, 0.99, 1.0])
def test_top_p_keeps_the_same_tokens_as_hugging_face(scale, p):
    logits = _logits(scale)
    kept = keep_top_p(logits.softmax(dim=1), np.full(8, p)) > 0
    assert torch.equal(kept, _kept_by_hf(TopPLogitsWarper(p), logits) if p < 1 else torch.ones_like(kept))


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("p", [0.0, 0.01, 0.3, 1.0])
def test_min_p_keeps_the_same_tokens_as_hugging_face(scale, p):
    logits = _logits(scale)
    kept = keep_min_p(logits.softmax(dim=1), np.full(8, p)) > 0
    assert torch.equal(kept, _kept_by_hf(MinPLogitsWarper(p), logits))


@pytest.mark.parametrize(
    ("keep", "settings"),
    [
        (keep_top_k, np.array([1000, 3, 1000, 7])),
        (keep_top_p, np.array([1.0, 0.3, 1.0, 0.7])),
        (keep_min_p, np.array([0.0, 0.3, 0.0, 0.7])),
    ],
)
def test_rows_without_a_filter_are_unchanged_and_others_do_not_depend_on_the_batch(keep, settings):
    probs = _logits(2.0, rows=4).softmax(dim=1)
    before = probs.clone()
    kept = keep(probs, settings)
    assert torch.equal(probs, before)
    assert torch.equal(kept[[0, 2]], probs[[0, 2]])
    for i in (1, 3):
        assert torch.equal(kept[i], keep(probs[i : i + 1], settings[i : i + 1])[0])


@pytest.mark.parametrize(
    ("keep", "setting"), [(keep_top_k, np.array([2])), (keep_top_p, np.array([0.5])), (keep_min_p, np.array([1.0]))]
)
def test_ties_with_the_last_kept_token_are_kept(keep, setting):
    probs = torch.tensor([[0.25, 0.1, 0.25, 0.15, 0.25]])
    kept = keep(probs, setting)
    assert (kept > 0).tolist() == [[True, False, True, False, True]]


@pytest.mark.parametrize(
    ("keep", "setting"), [(keep_top_k, np.full(2, 2)), (keep_top_p, np.full(2, 0.5)), (keep_min_p, np.full(2, 0.5))]
)
def test_a_row_of_nan_does_not_affect_its_neighbour(keep, setting):
    probs = torch.tensor([[0.7, 0.2, 0.1], [torch.nan] * 3])
    assert torch.equal(keep(probs, setting)[0], keep(probs[:1], setting[:1])[0])
