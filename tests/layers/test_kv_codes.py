"""A row of keys or values is encoded as codes and a scale, and decoded within the precision of the codes."""

import pytest
import torch

from graftlm.layers import CacheRows, encode_int8

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("row", "codes", "scale"),
    [
        ([127.0, -127.0, 1.0, 0.0], [127, -127, 1, 0], 1.0),
        ([254.0, 3.0, -5.0, 1.0], [127, 2, -2, 0], 2.0),  # 1.5, -2.5 and 0.5 are rounded to even
        ([0.0, -0.0, 0.0, 0.0], [0, 0, 0, 0], 0.0),
        ([1e-45, -1e-45, 0.0, 0.0], [127, -127, 0, 0], 0.0),  # too small for a scale; 0 when decoded
        ([100.0, 50.0, -100.0, 0.0], [127, 63, -127, 0], 0.7890625),  # 100 / 127 is 0.787; the scale is rounded first
    ],
)
def test_the_largest_magnitude_becomes_127(row, codes, scale):
    encoded, scales = encode_int8(torch.tensor([row]))
    assert encoded.tolist() == [codes]
    assert scales.tolist() == [scale]


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_a_row_with_a_non_finite_number_is_nan_when_decoded(bad):
    rows = torch.ones(2, 1, 4)
    rows[1, 0, 2] = bad
    cache = CacheRows(torch.zeros(3, 1, 4, dtype=torch.int8), torch.zeros(3, 1, dtype=torch.bfloat16))
    cache.write(torch.tensor([2, 0]), rows)
    read = cache.read(torch.tensor([2, 0, 1]), torch.float32)
    torch.testing.assert_close(read[0], rows[0], rtol=4e-3, atol=0)
    assert not read[1].isfinite().any()
    assert read[2].tolist() == [[0.0] * 4]


@pytest.mark.parametrize("magnitude", [1e-30, 1e-3, 1.0, 7e4, 1e30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_error_of_a_number_is_at_most_half_a_code(magnitude, dtype):
    rows = (torch.randn(40, 3, 64, generator=torch.Generator().manual_seed(0)) * magnitude).to(dtype)
    rows = rows.nan_to_num(posinf=6e4, neginf=-6e4)
    codes, scales = encode_int8(rows)
    error = (codes * scales.float().unsqueeze(-1) - rows.float()).abs()
    # If the scale was rounded down, the largest number is a quarter of a code beyond 127.
    assert (error <= 0.5001 * scales.float().unsqueeze(-1)).all()


def test_fp8_keeps_representable_numbers_and_saturates():
    cache = CacheRows(torch.zeros(2, 1, 4, dtype=torch.float8_e4m3fn), None)
    cache.write(torch.tensor([1]), torch.tensor([[[1.0, 1000.0, -1000.0, 0.3]]]))
    assert cache.read(slice(1, 2), torch.bfloat16).tolist() == [[[1.0, 448.0, -448.0, 0.3125]]]


def test_rows_in_the_models_dtype_are_read_without_a_copy():
    rows = CacheRows(torch.randn(4, 1, 2), None)
    assert rows.read(slice(1, 3), torch.float32).data_ptr() == rows.stored[1].data_ptr()
