import pytest
import torch

from graftlm.execution.graphs import HeldGraphs
from graftlm.execution.released_tensors import ReleasedTensors


def test_on_a_cpu_tensors_keep_their_addresses_and_can_be_written_again():
    tensor = torch.ones(1000, 1000)
    view, address = tensor[10:], tensor.data_ptr()
    released = ReleasedTensors([tensor, view])
    assert not released.changes_addresses
    released.restore()
    assert tensor.shape == (1000, 1000)
    assert tensor.data_ptr() == address
    tensor.fill_(2.0)
    assert view.min() == 2.0


def test_on_other_devices_tensors_have_no_memory_until_they_are_restored():
    tensor = torch.empty(10, 3, device="meta")  # stands for a GPU: its storages have sizes, but no memory
    view = tensor[2:]
    released = ReleasedTensors([tensor, view])
    assert released.changes_addresses
    assert tensor.untyped_storage().nbytes() == 0
    assert tensor.shape == (10, 3)
    for _ in range(2):
        released.restore()
        assert view.untyped_storage().nbytes() == 120


class Graphs:
    uses_packed_weights = True

    def __init__(self):
        self.num_captures = 0

    def recapture(self):
        self.num_captures += 1


@pytest.mark.parametrize("num_recaptures", [0, 1, 2])
def test_held_graphs_are_captured_once_at_the_end_of_the_last_hold(num_recaptures):
    graphs = Graphs()
    held = HeldGraphs(graphs)
    held.hold()
    held.hold()
    for _ in range(num_recaptures):
        held.recapture()
    held.unhold()
    assert graphs.num_captures == 0
    held.unhold()
    assert graphs.num_captures == min(num_recaptures, 1)
    held.recapture()
    assert graphs.num_captures == min(num_recaptures, 1) + 1


def test_without_graphs_nothing_is_captured():
    held = HeldGraphs()
    assert not held.uses_packed_weights
    held.hold()
    held.recapture()
    held.unhold()
