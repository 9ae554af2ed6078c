"""A recorded function gives the results of the function."""

import logging

import pytest
import torch

from graftlm.execution.recorded_function import RecordedFunction


class Counted:
    """A function of two tensors that counts its calls, and adds to a tensor of its own."""

    def __init__(self):
        self.num_calls = 0
        self.total = torch.zeros(100)

    def __call__(self, rows, idx):
        self.num_calls += 1
        logits = rows.float() @ torch.ones(rows.shape[1], 5).cumsum(1)
        largest, best = logits.max(dim=1)
        self.total.index_copy_(0, idx, largest)
        return best, torch.exp(largest)


def inputs(size, seed):
    draw = torch.Generator().manual_seed(seed)
    return torch.rand(size, 3, generator=draw), torch.randperm(100, generator=draw)[:size]


@torch.inference_mode()
@pytest.mark.parametrize("is_recorded", [False, True])
def test_the_results_are_those_of_the_function(is_recorded):
    function, reference = Counted(), Counted()
    recorded = RecordedFunction("it", function, is_recorded=is_recorded)
    for seed in range(12):
        given = inputs((1, 3, 64, 70)[seed % 4], seed)
        found, expected = recorded(*given), reference(*given)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other)
        torch.testing.assert_close(function.total, reference.total)
    # 3 sizes are called twice each: while they are recorded and checked. 70 rows are too many.
    assert function.num_calls == (3 * 2 + 3 if is_recorded else 12)


@torch.inference_mode()
def test_a_function_that_depends_on_values_is_not_recorded(caplog):
    def function(rows):
        return (rows * int(rows.sum().item() > 1),)

    recorded = RecordedFunction("it", function, is_recorded=True)
    with caplog.at_level(logging.INFO):
        assert recorded(torch.ones(2, 2))[0].sum() == 4
        assert recorded(torch.zeros(2, 2))[0].sum() == 0
    assert "it is not recorded: " in caplog.text


@torch.inference_mode()
def test_a_function_with_hidden_state_is_not_recorded(caplog):
    numbers = iter([1.0, 2.0, 3.0, 4.0, 5.0])

    def function(rows):
        return (rows + next(numbers),)

    recorded = RecordedFunction("it", function, is_recorded=True)
    with caplog.at_level(logging.INFO):
        found = [float(recorded(torch.zeros(1, 1))[0]) for _ in range(3)]
    assert found[0] == 1.0
    assert found[1:] == [3.0, 4.0]
    assert "repeated calls gave other results" in caplog.text
