"""Requests that share a prefix are found, and attention that reads the prefix once gives the same result."""

import numpy as np
import pytest
import torch

from graftlm.contracts import AttentionLayer
from graftlm.testing.attention_scene import AttentionScene
from graftlm.testing.reference_attention import ReferenceAttention
from graftlm_attention import native_paged
from graftlm_attention.native_paged import NativePagedAttention
from graftlm_attention.shared_prefixes import find_shared_prefixes

CPU = torch.device("cpu")


def table_of(rows, num_columns):
    """Make a page table with rows (first common page, number of common pages, all pages); other pages are unique."""
    table = np.arange(len(rows) * num_columns, dtype=np.int32).reshape(len(rows), -1) + 10_000
    for row, (first, count) in zip(table, rows, strict=True):
        row[:count] = np.arange(first, first + count)
    return table


def found(rows, lens, page_size=1, num_columns=400, num_decodes=None):
    seq_lens = np.array(lens, dtype=np.int32)
    table = table_of(rows, num_columns)
    shared = find_shared_prefixes(table, seq_lens, len(rows) if num_decodes is None else num_decodes, page_size)
    if shared is None:
        return []
    assert all(array.dtype == np.int32 and array.flags.c_contiguous for array in shared)
    groups = np.split(shared.members, shared.starts[1:-1])
    return sorted((group.tolist(), int(length)) for group, length in zip(groups, shared.lens, strict=True))


def test_requests_with_the_same_pages_are_a_group():
    assert found([(0, 300)] * 5, [390, 380, 301, 399, 350]) == [([0, 1, 2, 3, 4], 300)]


def test_groups_may_be_in_any_order_among_other_requests():
    rows = [(0, 300), (5000, 260), (0, 0), (0, 300), (5000, 260), (0, 320), (0, 300), (5000, 257), (5000, 260)]
    assert found(rows, [390] * 9) == [([0, 3, 5, 6], 300), ([1, 4, 7, 8], 257)]


def test_the_last_token_of_a_group_is_never_shared():
    """Even if its page is shared, the token is written in this step, and every request has its own."""
    assert found([(0, 390)] * 4, [300, 310, 320, 330]) == [([0, 1, 2, 3], 299)]
    assert found([(0, 40)] * 4, [320, 330, 340, 350], page_size=16, num_columns=50) == [([0, 1, 2, 3], 304)]


@pytest.mark.parametrize("common", [511, 512, 513, 1024, 1500, 1599])
def test_prefixes_of_any_length_are_found(common):
    assert found([(0, common)] * 4, [1600] * 4, num_columns=1700) == [([0, 1, 2, 3], common)]


def test_tokens_after_the_first_difference_are_not_compared():
    """The time of a step does not grow with contexts that share little."""
    compared = []

    class Table(np.ndarray):
        def __getitem__(self, key):
            taken = super().__getitem__(key)
            if isinstance(key, tuple) and isinstance(key[1], slice):
                compared.append(taken.size)
            return taken

    table = table_of([(0, 300)] * 8, 50_000).view(Table)
    shared = find_shared_prefixes(table, np.full(8, 50_000, dtype=np.int32), 8, 1)
    assert shared.lens.tolist() == [300]
    assert sum(compared) < 8 * 2048


@pytest.mark.parametrize("page_size", [1, 16, 128])
def test_page_0_before_a_window_does_not_count_as_shared(page_size):
    table = table_of([(0, 0)] * 6, 400)
    table[:, :390] = 0
    assert find_shared_prefixes(table, np.full(6, 400 * page_size, dtype=np.int32), 6, page_size) is None


def test_pages_that_are_equal_after_a_difference_are_not_shared():
    """A prefix cache never produces such tables, and the result does not depend on it."""
    table = table_of([(0, 390)] * 4, 400)
    table[:, 20] = [7001, 7002, 7003, 7004]
    assert find_shared_prefixes(table, np.full(4, 395, dtype=np.int32), 4, 1) is None
    table = table_of([(0, 390)] * 4, 400)
    table[2, 300] = 7001
    assert find_shared_prefixes(table, np.full(4, 395, dtype=np.int32), 4, 1).lens.tolist() == [300]


@pytest.mark.parametrize(
    ("rows", "lens", "options"),
    [
        ([(0, 300)] * 3, [390] * 3, {}),
        ([(0, 255)] * 8, [390] * 8, {}),
        ([(0, 300)] * 8, [256] * 8, {}),
        ([(0, 300)] * 8, [390] * 8, {"num_decodes": 3}),
        ([(0, 10)] * 8, [100] * 8, {"num_columns": 100}),
        ([(0, 0)] * 8, [390] * 8, {}),
    ],
    ids=["few requests", "few tokens", "short contexts", "chunks", "a narrow table", "nothing in common"],
)
def test_requests_that_would_gain_nothing_are_not_grouped(rows, lens, options):
    assert found(rows, lens, **options) == []


def scene_of(layer, *, page_size, dtype, kv_dtype, num_sharing=(5, 4)):
    """Draw two groups, requests in no group between them, and a chunk that starts with the pages of a group."""
    pasts = [(common, 300 + 17 * i) for common, num in zip((259, 300), num_sharing, strict=True) for i in range(num)]
    pasts += [(0, 280), (0, 3), (0, 0)]
    order = torch.randperm(len(pasts), generator=torch.Generator().manual_seed(1)).tolist()
    requests, tables, next_page = [], [], 1000
    for common, past in [*[pasts[i] for i in order], (300, 310)]:
        new = 1 if len(requests) < len(pasts) else 20
        num_pages = -(-(past + new) // page_size)
        own = num_pages - common // page_size
        first = {0: 0, 259: 0, 300: 400}[common]
        tables.append([*range(first, first + common // page_size), *range(next_page, next_page + own)])
        next_page += own
        requests.append((past, new))
    return AttentionScene.draw(
        requests, [layer], page_size=page_size, dtype=dtype, device=CPU, page_tables=tables, kv_dtype=kv_dtype
    )


LAYERS = {
    "plain": {},
    "one head a group": {"num_heads": 2},
    "soft cap": {"soft_cap": 5.0},
    "sinks": {"sinks": torch.linspace(-3, 9, 6)},
    "negative scale": {"scale": -0.2},
    "values in keys": {"value_prefix_dim": 16},
    "a window": {"sliding_window": 40},
    "a window that some outgrow": {"sliding_window": 320},
}


@pytest.mark.covering
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize(
    ("dtype", "kv_dtype"),
    [(torch.float32, None), (torch.bfloat16, None), (torch.bfloat16, torch.int8), (torch.float32, torch.int8)],
)
@pytest.mark.parametrize("special", LAYERS.values(), ids=LAYERS.keys())
def test_attention_with_shared_prefixes_equals_the_reference(
    kernel, monkeypatch, page_size, num_threads, dtype, kv_dtype, special
):
    found = []

    def spy(*args):
        found.append(find_shared_prefixes(*args))
        return found[-1]

    monkeypatch.setattr(native_paged, "find_shared_prefixes", spy)
    layer = AttentionLayer(0, **{"num_heads": 6, "num_kv_heads": 2, "head_dim": 32, "scale": 0.2} | special)
    scene = scene_of(layer, page_size=page_size, dtype=dtype, kv_dtype=kv_dtype)
    expected = scene.run(ReferenceAttention).outputs[0]
    tolerance = 1e-5 if dtype is torch.float32 else 2e-2
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        for matrix_units in (True, False):
            out = scene.run(lambda c, u=matrix_units: NativePagedAttention(c, kernel, matrix_units=u)).outputs[0]
            torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance)
    finally:
        torch.set_num_threads(before)
    assert [sorted(shared.lens) for shared in found] == [[259, 300] if page_size == 1 else [256, 288]] * 2


def test_a_large_group_takes_several_blocks(kernel):
    layer = AttentionLayer(0, num_heads=6, num_kv_heads=2, head_dim=32, scale=0.2)
    scene = scene_of(layer, page_size=1, dtype=torch.bfloat16, kv_dtype=None, num_sharing=(150, 4))
    expected = scene.run(ReferenceAttention).outputs[0]
    for matrix_units in (True, False):
        out = scene.run(lambda c, u=matrix_units: NativePagedAttention(c, kernel, matrix_units=u)).outputs[0]
        torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2)
