"""The index arrays compared with lists that are built request by request."""

import random

import numpy as np
import pytest
import torch

from graftlm.testing.batches import make_batch
from graftlm_attention.flashinfer_indices import ragged_pages, shared_pages, shared_prefix


def draw_batch(seed, page_size):
    """Draw requests of (past, new) tokens on random pages, one-token requests first."""
    rng = random.Random(seed)
    requests = [(rng.choice((0, 1, 15, 16, 17, rng.randint(2, 90))), 1) for _ in range(rng.randint(1, 5))]
    requests += [(rng.choice((0, 16, rng.randint(1, 60))), rng.randint(2, 40)) for _ in range(rng.randint(0, 3))]
    pages = list(range(1000))
    rng.shuffle(pages)
    tables = [[pages.pop() for _ in range(-(-(past + new) // page_size))] for past, new in requests]
    batch = make_batch([([0] * new, past) for past, new in requests], tables, page_size, device=torch.device("cpu"))
    return requests, tables, batch


def naive(requests, tables, page_size, window=None, num_shared=0):
    """Return indptr, indices and last_page_len, with the pages of each request that contain a visible token."""
    indptr, indices, last = [0], [], []
    for (past, new), table in zip(requests, tables, strict=True):
        first_seen = 0 if window is None else max(0, past - window + 1)
        seen = [page for i, page in enumerate(table) if (i + 1) * page_size > first_seen and i >= num_shared]
        indices += seen
        indptr.append(len(indices))
        last.append((past + new - 1) % page_size + 1)
    return indptr, indices, last


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("window", [None, 1, 7, 40])
def test_every_request_lists_the_pages_that_its_queries_see(page_size, window):
    for seed in range(8):
        requests, tables, batch = draw_batch(seed, page_size)
        for part in (slice(0, batch.num_decodes), slice(batch.num_decodes, len(requests)), slice(0, len(requests))):
            pages = ragged_pages(batch, part, page_size, window)
            found = pages.indptr.tolist(), pages.indices.tolist(), pages.last_page_len.tolist()
            assert found == naive(requests[part], tables[part], page_size, window)
            assert {pages.indptr.dtype, pages.indices.dtype, pages.last_page_len.dtype} == {torch.int32}


def batch_of(requests, tables, page_size):
    return make_batch([([0] * new, past) for past, new in requests], tables, page_size, device=torch.device("cpu"))


LONG = list(range(300))


@pytest.mark.parametrize(
    ("requests", "tables", "expected"),
    [
        ([(48, 1), (48, 1)], [[3, 1, 2, 9], [3, 1, 2, 8]], 3),
        ([(48, 1), (47, 1)], [[3, 1, 2, 9], [3, 1, 2]], 2),  # the token of the second request is in the third page
        ([(48, 1), (16, 33)], [[3, 1, 2, 9], [3, 1, 2, 8]], 1),
        ([(48, 1), (0, 20)], [[3, 1, 2, 9], [3, 1]], 0),
        ([(48, 1), (48, 1), (48, 1)], [[3, 1, 2, 9], [3, 7, 2, 8], [3, 1, 2, 5]], 1),
        ([(48, 1), (48, 1)], [[4, 1, 2, 9], [3, 1, 2, 8]], 0),
        ([(4800, 1), (4800, 1)], [[*LONG, 900], [*LONG, 901]], 300),
        ([(4800, 1), (4800, 1)], [[*LONG[:-1], 800, 900], [*LONG, 901]], 299),
        ([(4800, 1), (4800, 1)], [[*LONG[:64], 800, *LONG[65:], 900], [*LONG, 901]], 64),
    ],
)
def test_shared_pages_are_at_the_front_of_all_requests_and_before_all_queries(requests, tables, expected):
    assert shared_pages(batch_of(requests, tables, 16), 16) == expected


def test_the_shared_prefix_and_the_rest_are_all_pages():
    requests, tables = [(48, 1), (60, 1), (40, 30)], [[3, 1, 2, 9], [3, 1, 4, 8], [3, 1, 5, 6, 7]]
    batch = batch_of(requests, tables, 16)
    shared, rest = shared_prefix(batch, 2, 16), ragged_pages(batch, slice(0, 3), 16, num_shared=2)
    assert (shared.indptr.tolist(), shared.indices.tolist(), shared.last_page_len.tolist()) == ([0, 2], [3, 1], [16])
    assert (rest.indptr.tolist(), rest.indices.tolist(), rest.last_page_len.tolist()) == naive(
        requests, tables, 16, num_shared=2
    )
    assert np.diff(rest.indptr.numpy()).min() > 0
