from dataclasses import replace

import pytest
import torch

from graftlm.contracts import AttentionBackend, AttentionLayer
from graftlm.errors import InvariantError
from graftlm.execution.split_attention import SplitAttention
from graftlm.testing.batches import make_batch

FULL = AttentionLayer(layer_id=0, num_heads=1, num_kv_heads=1, head_dim=2, scale=1.0)
WINDOWED = replace(FULL, layer_id=1, sliding_window=4)


class Recorder(AttentionBackend):
    """Records the batch that it was prepared with, and the layers that it was called for."""

    def __init__(self):
        self.batch, self.layers = None, []

    def prepare(self, batch):
        self.batch = batch

    def forward(self, q, k, v, layer):
        self.layers.append(layer)
        return q.flatten(1)


def two_batches():
    batch = make_batch([([5, 6, 7], 0)], [[0, 1]], page_size=2)
    windowed = replace(batch, page_table=batch.page_table + 1)
    return replace(batch, window=windowed), windowed


def test_each_layer_uses_the_backend_of_its_memory():
    full, window = Recorder(), Recorder()
    attention = SplitAttention(full, window)
    batch, windowed = two_batches()
    attention.prepare(batch)
    assert (full.batch, window.batch) == (batch, windowed)
    q = torch.zeros(3, 1, 2)
    for layer in (WINDOWED, FULL, WINDOWED):
        attention.forward(q, q, q, layer)
    assert (full.layers, window.layers) == ([FULL], [WINDOWED, WINDOWED])


def test_wrong_calls_raise_invariant_errors():
    attention = SplitAttention(None, Recorder())
    batch, windowed = two_batches()
    with pytest.raises(InvariantError, match="no window page table"):
        attention.prepare(windowed)
    attention.prepare(batch)
    q = torch.zeros(3, 1, 2)
    with pytest.raises(InvariantError, match="no backend was made for layers without a window"):
        attention.forward(q, q, q, FULL)
