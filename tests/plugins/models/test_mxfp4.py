import pytest
import torch
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from graftlm.errors import WeightError
from graftlm_models.mxfp4 import dequantize_mxfp4, plain_weights


def draw(*sizes):
    """Return random blocks [E, out, in / 32] and their scales."""
    generator = torch.Generator().manual_seed(1)
    blocks = torch.randint(256, (*sizes, 16), generator=generator, dtype=torch.uint8)
    return blocks, torch.randint(1, 255, sizes, generator=generator, dtype=torch.uint8)


def test_every_byte_and_exponent_decodes_as_in_transformers():
    blocks, scales = draw(3, 40, 5)
    expected = convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16)  # [E, in, out]
    got = dequantize_mxfp4(blocks, scales, "w")
    assert (got.shape, got.dtype) == ((3, 40, 160), torch.bfloat16)
    assert torch.equal(got.transpose(1, 2), expected)


@pytest.mark.parametrize("order", [("w_blocks", "v", "w_scales"), ("w_scales", "w_blocks", "v")])
def test_blocks_and_scales_are_joined_in_either_order(order):
    blocks, scales = draw(2, 4, 1)
    tensors = {"w_blocks": blocks, "w_scales": scales, "v": torch.ones(3)}
    plain = dict(plain_weights((name, tensors[name]) for name in order))
    assert set(plain) == {"v", "w"}
    assert plain["v"] is tensors["v"]
    assert torch.equal(plain["w"], dequantize_mxfp4(blocks, scales, "w").transpose(1, 2))


def test_a_missing_half_of_a_pair_is_an_error_with_its_name():
    blocks, _ = draw(2, 4, 1)
    with pytest.raises(WeightError, match="'w_blocks', but not 'w_scales'"):
        list(plain_weights([("w_blocks", blocks)]))


@pytest.mark.parametrize(
    "change",
    [
        lambda blocks, scales: (blocks[..., :8], scales),
        lambda blocks, scales: (blocks, scales[:, :2]),
        lambda blocks, scales: (blocks[0], scales[0]),
        lambda blocks, scales: (blocks.to(torch.int8), scales),
        lambda blocks, scales: (blocks, scales.float()),
    ],
)
def test_malformed_mxfp4_tensors_are_an_error(change):
    blocks, scales = change(*draw(2, 4, 1))
    with pytest.raises(WeightError, match=r"'w' is not MXFP4.*expected uint8"):
        dequantize_mxfp4(blocks, scales, "w")
