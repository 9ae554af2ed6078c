import pytest
import torch

from graftlm_quantization.coded_matrix import encode

BITS_PER_WEIGHT = {(4, 32): 5.0, (4, 64): 4.5, (4, 128): 4.25, (8, 64): 8.5, (8, 256): 8.125}


def weight_of(rows=70, inputs=256, dtype=torch.float32):
    return torch.randn(rows, inputs, generator=torch.Generator().manual_seed(3)).to(dtype)


def decoded(matrix):
    return matrix.decoded(0, matrix.num_blocks)


@pytest.mark.parametrize(("bits", "group_size"), BITS_PER_WEIGHT)
def test_the_error_of_a_weight_is_at_most_slightly_more_than_half_a_step(bits, group_size):
    weight = weight_of()
    matrix = encode(weight, bits, group_size)
    steps = matrix.scales[..., 0].float().transpose(1, 2).flatten(0, 1)[: len(weight)]  # [N, groups]
    error = (decoded(matrix) - weight).abs().view(len(weight), -1, group_size)
    # An offset is rounded to bfloat16: to one part in 512 of at most eight steps and the group's mean.
    assert bool((error <= 0.53 * steps[..., None]).all())


@pytest.mark.parametrize(("bits", "group_size"), BITS_PER_WEIGHT)
def test_a_matrix_takes_the_documented_bits_per_weight(bits, group_size):
    matrix = encode(weight_of(rows=64), bits, group_size)
    assert matrix.num_bytes * 8 / (64 * 256) == BITS_PER_WEIGHT[bits, group_size]


@pytest.mark.parametrize("bits", [4, 8])
def test_encoding_decoded_weights_again_loses_nothing(bits):
    once = decoded(encode(weight_of().bfloat16(), bits, 64))
    twice = decoded(encode(once, bits, 64))
    assert torch.allclose(once, twice, rtol=0, atol=0.02 * float(once.abs().max()))


def test_every_code_is_decoded():
    codes = torch.arange(-8, 8).repeat(4).float()  # 64 inputs, scale 1, offset 0
    assert torch.equal(decoded(encode(codes.repeat(40, 1), 4, 64)), codes.repeat(40, 1))
    codes = torch.arange(-127, 129).clamp(max=127).float()
    assert torch.equal(decoded(encode(codes.repeat(3, 1), 8, 256)), codes.repeat(3, 1))


@pytest.mark.parametrize("bits", [4, 8])
def test_decoded_blocks_equal_the_rows_of_the_decoded_matrix(bits):
    matrix = encode(weight_of(rows=1100), bits, 32)  # more rows than are encoded at a time
    assert torch.equal(matrix.decoded(1, 3), decoded(matrix)[32:96])
    assert matrix.decoded(34, 35).shape == (1100 - 34 * 32, 256)
