import pytest

from graftlm.testing.batches import make_batch


def test_slots_are_computed_from_the_page_tables() -> None:
    batch = make_batch([([5], 3), ([1, 2, 3], 1)], [[2, 1], [7, 0]], page_size=2)
    assert batch.input_ids.tolist() == [5, 1, 2, 3]
    assert batch.positions.tolist() == [3, 1, 2, 3]
    assert batch.out_slots.tolist() == [3, 15, 0, 1]
    assert batch.cu_seqlens_q.tolist() == [0, 1, 4]
    assert batch.seq_lens.tolist() == batch.seq_lens_cpu.tolist() == [4, 4]
    assert batch.logits_idx.tolist() == [0, 3]
    assert batch.num_decodes == 1
    assert (batch.num_requests, batch.num_tokens) == (2, 4)


def test_short_page_tables_are_padded_with_their_first_page() -> None:
    batch = make_batch([([1], 0), ([1, 2, 3], 0)], [[4], [3, 2, 1]], page_size=1)
    assert batch.page_table.tolist() == batch.page_table_cpu.tolist() == [[4, 4, 4], [3, 2, 1]]


@pytest.mark.parametrize(
    ("requests", "page_tables", "message"),
    [
        ([([1], 0)], [], "one page table for each"),
        ([([], 0)], [[0]], "at least one token"),
        ([([1, 2], 0), ([1], 0)], [[0], [1]], "must be first"),
        ([([1, 2], 3)], [[0]], "request 0 has 5 tokens of context but 1 pages of 4"),
    ],
)
def test_impossible_batches_are_refused(requests, page_tables, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_batch(requests, page_tables, page_size=4)
