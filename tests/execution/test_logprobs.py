import pytest
import torch

from graftlm.execution.logprobs import padded_ids, token_logprobs


def _logits(rows, vocab_size, dtype=torch.float32):
    return (torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(0)) * 3).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_top", [0, 1, 5])
def test_logprobs_equal_log_softmax_in_float32(dtype, num_top):
    logits = _logits(6, 50, dtype)
    targets = torch.tensor([0, 49, 3, 3, 7, 20])
    expected = logits.float().log_softmax(dim=1)
    found = token_logprobs(logits, targets, num_top)
    torch.testing.assert_close(found.token_logprobs, expected.gather(1, targets[:, None]).squeeze(1))
    torch.testing.assert_close(found.top_logprobs, expected.topk(num_top, dim=1).values)
    torch.testing.assert_close(expected.gather(1, found.top_ids), found.top_logprobs)
    assert found.top_ids.shape == (6, num_top)
    assert found.token_logprobs.dtype == found.top_logprobs.dtype == torch.float32


def test_results_do_not_depend_on_the_chunks_of_rows():
    logits = _logits(40, 2**19, torch.bfloat16)
    targets = torch.arange(40)
    requested = torch.stack([targets, targets + 2**18], dim=1)
    found = token_logprobs(logits, targets, 2, requested)
    for i in (0, 31, 32, 39):
        alone = token_logprobs(logits[i : i + 1], targets[i : i + 1], 2, requested[i : i + 1])
        assert [part[i].tolist() for part in found] == [part[0].tolist() for part in alone]


def test_the_number_of_alternatives_is_limited_by_the_vocabulary():
    assert token_logprobs(_logits(1, 3), torch.tensor([0]), 20).top_ids.shape == (1, 3)


def test_no_rows_give_empty_tables():
    found = token_logprobs(_logits(0, 10), torch.empty(0, dtype=torch.int64), 4)
    assert [tuple(part.shape) for part in found[:3]] == [(0,), (0, 4), (0, 4)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logprobs_of_requested_tokens_equal_log_softmax(dtype):
    logits = _logits(3, 50, dtype)
    requested = torch.tensor([[0, 49], [7, 7], [3, 0]])
    found = token_logprobs(logits, torch.tensor([1, 2, 3]), 0, requested)
    torch.testing.assert_close(found.requested, logits.float().log_softmax(dim=1).gather(1, requested))
    assert token_logprobs(logits, torch.tensor([1, 2, 3]), 0).requested is None


@pytest.mark.parametrize(
    ("ids", "padded"), [([], None), ([(), ()], None), ([(5,), (), (7, 8)], [[5, 0], [0, 0], [7, 8]])]
)
def test_lists_of_ids_are_padded(ids, padded):
    found = padded_ids(ids)
    assert (found if found is None else found.tolist()) == padded
