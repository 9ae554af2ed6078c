import pytest
import torch

from graftlm_attention.triton_shapes import ContextSplits, decode_shape, extend_shape, split_contexts

HEAD_DIMS = [8, 16, 64, 80, 96, 128, 192, 256]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize(
    ("num_requests", "num_kv_heads", "max_len", "split_tokens", "expected"),
    [
        (1, 8, 100, None, (1, 128)),  # too short to be cut
        (1, 8, 1024, None, (8, 128)),  # the maximum number of pieces
        (1, 8, 131072, None, (66, 128)),  # as many pieces as fill 132 processors
        (16, 8, 131072, None, (16, 128)),  # no piece is longer than 8192 tokens
        (16, 8, 4096, None, (4, 128)),
        (256, 8, 4096, None, (1, 128)),  # the batch alone fills the processors
        (256, 8, 16384, None, (2, 128)),
        (1, 8, 4000, 256, (16, 256)),  # the configured length, for every batch
        (256, 8, 4000, 256, (16, 256)),
        (1, 8, 100, 256, (1, 256)),
    ],
)
def test_contexts_are_cut_into_as_many_pieces_as_fill_the_device(
    num_requests, num_kv_heads, max_len, split_tokens, expected
):
    assert split_contexts(num_requests, num_kv_heads, max_len, 132, split_tokens) == ContextSplits(*expected)


@pytest.mark.covering
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("group", [1, 3, 4, 7, 16, 71])
def test_tiles_hold_all_heads_of_a_token_and_have_sizes_of_tensor_cores(group, head_dim, dtype):
    shapes = [extend_shape(group, head_dim, dtype, length) for length in (2, 16, 4096)]
    for shape in (*shapes, decode_shape(group, head_dim, dtype)):
        assert shape.block_m >= group
        assert shape.block_d >= head_dim
        for side in (shape.block_m, shape.block_n, shape.block_d):
            assert side >= 16
            assert side & (side - 1) == 0
    assert [shape.block_n for shape in shapes] == [shapes[0].block_n] * 3


def test_short_chunks_use_small_tiles():
    assert [extend_shape(4, 128, torch.bfloat16, length).block_m for length in (2, 4, 5, 16, 17, 4096)] == [
        16,
        16,
        64,
        64,
        128,
        128,
    ]
