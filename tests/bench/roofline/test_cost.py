"""The cost of an operator follows from its shapes."""

import numpy as np
import pytest
import torch

from graftlm.bench.roofline.cost import (
    Cost,
    activation_cost,
    attention_cost,
    grouped_linear_cost,
    linear_cost,
    lm_head_cost,
    rotation_cost,
)
from graftlm.contracts import AttentionLayer
from graftlm.layers import GroupedLinear, Linear, RowGroups

CPU = torch.device("cpu")


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_linear_layer_reads_its_weights_once(dtype, packed):
    layer = Linear(1024, {"a": 400, "b": 624}, bias=True, device=CPU, dtype=dtype)
    if packed:
        layer.pack()
    cost = linear_cost(layer, torch.empty(3, 1024, dtype=dtype), torch.empty(3, 1024, dtype=dtype))
    size = dtype.itemsize
    assert cost == Cost(1024 * 1024 * size + 1024 * size, 0, 2 * 3 * 1024 * size, 2 * 3 * 1024 * 1024)


@pytest.mark.parametrize("packed", [False, True])
def test_experts_without_rows_are_not_read(packed):
    layer = GroupedLinear(4, 1024, 512, ("a",), device=CPU, dtype=torch.float32)
    if packed:
        layer.pack()
    groups = RowGroups.of(torch.tensor([1, 1, 3]), num_experts=4)
    cost = grouped_linear_cost(layer, groups, torch.empty(3, 1024), torch.empty(3, 512))
    assert cost == Cost(2 * 1024 * 512 * 4, 0, 3 * (1024 + 512) * 4, 2 * 3 * 1024 * 512)


@pytest.mark.parametrize(
    ("query_lens", "seq_lens", "window", "read", "pairs"),
    [
        ([1], [10], None, 10, 10),
        ([1, 1], [10, 4], None, 14, 14),
        ([4], [4], None, 4, 1 + 2 + 3 + 4),
        ([2], [6], None, 6, 5 + 6),
        ([1], [10], 3, 3, 3),
        ([4], [10], 3, 3 + 3, 4 * 3),
        ([4], [4], 3, 4, 1 + 2 + 3 + 3),
    ],
)
def test_attention_reads_visible_keys_and_writes_new_ones(query_lens, seq_lens, window, read, pairs):
    layer = AttentionLayer(0, num_heads=4, num_kv_heads=2, head_dim=8, scale=1.0, sliding_window=window)
    num_tokens = sum(query_lens)
    q, k = torch.empty(num_tokens, 4, 8), torch.empty(num_tokens, 2, 8)
    lens = [np.array(values, dtype=np.int32) for values in (query_lens, seq_lens)]
    cost = attention_cost(layer, *lens, torch.bfloat16, q, k)
    assert cost.kv_bytes == (read + num_tokens) * 2 * 2 * 8 * 2
    assert cost.flops == 4 * 4 * 8 * pairs
    assert cost.activation_bytes == 2 * q.nbytes + 2 * k.nbytes


def test_narrow_keys_and_values_count_with_their_scales():
    layer = AttentionLayer(0, num_heads=4, num_kv_heads=2, head_dim=8, scale=1.0)
    lens = np.array([1], dtype=np.int32), np.array([10], dtype=np.int32)
    cost = attention_cost(layer, *lens, torch.int8, torch.empty(1, 4, 8), torch.empty(1, 2, 8))
    assert cost.kv_bytes == (10 + 1) * 2 * 2 * (8 + 2)


def test_other_operators_move_their_inputs_and_outputs():
    assert activation_cost(torch.empty(5, 7)).activation_bytes == 3 * 5 * 7 * 4
    assert rotation_cost(torch.empty(5, 4, 8), torch.empty(5, 2, 8)).activation_bytes == 2 * 5 * 6 * 8 * 4
    assert lm_head_cost(torch.empty(2, 8), torch.empty(2, 50)).weight_bytes == 8 * 50 * 4
