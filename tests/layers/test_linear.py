import pytest
import torch
from torch import nn

from graftlm.layers import Linear, copy_weights, pack_linears
from graftlm_quantization import Int8Options
from graftlm_quantization.weight_only import WeightOnly

PARTS = {"gate_proj": 24, "up_proj": 40}


class Block(nn.Module):
    """One linear layer with its checkpoint, loaded as in models."""

    def __init__(self, bias, quantization=None):
        super().__init__()
        self.linear = Linear(128, PARTS, bias=bias, device=torch.device("cpu"), dtype=torch.float32)
        self.linear.quantize_with(quantization)

    def load(self, weights):
        copy_weights(self.linear.weight_slots("mlp."), weights.items())
        pack_linears(self)


def weights(seed, bias):
    generator = torch.Generator().manual_seed(seed)
    named = {f"mlp.{name}.weight": torch.randn(size, 128, generator=generator) for name, size in PARTS.items()}
    if bias:
        named |= {f"mlp.{name}.bias": torch.randn(size, generator=generator) for name, size in PARTS.items()}
    return named


def by_hand(x, named):
    return torch.cat(
        [x @ named[f"mlp.{name}.weight"].T + named.get(f"mlp.{name}.bias", torch.zeros(1)) for name in PARTS], dim=-1
    )


def int8():
    return WeightOnly(8, None, Int8Options(kernel="torch"))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("quantization", [None, int8()], ids=["plain", "int8"])
def test_loading_again_replaces_all_weights(quantization, bias):
    block, x = Block(bias, quantization), torch.randn(5, 128, generator=torch.Generator().manual_seed(9))
    for seed in (1, 2):
        block.load(weights(seed, bias))
        expected = by_hand(x, weights(seed, bias))
        error = (block.linear(x) - expected).norm() / expected.norm()
        assert error < (0.01 if quantization else 1e-5)


def test_quantizing_frees_the_plain_weight():
    block = Block(bias=False, quantization=int8())
    block.load(weights(1, bias=False))
    assert block.linear.weight.numel() == 0
    assert block.linear.kernel.num_bytes < 64 * 128 * 2


def test_loading_without_a_quantization_makes_weights_plain_again():
    block = Block(bias=False, quantization=int8())
    block.load(weights(1, bias=False))
    block.linear.quantize_with(None)
    block.load(weights(2, bias=False))
    assert block.linear.kernel is None
    x = torch.ones(1, 128)
    assert torch.allclose(block.linear(x), by_hand(x, weights(2, bias=False)), atol=1e-4)


def test_a_layers_description_has_its_projections():
    layer = Block(bias=False).linear.describe("layers.0.mlp.gate_up")
    assert (layer.name, layer.projections) == ("layers.0.mlp.gate_up", ("gate_proj", "up_proj"))
    assert (layer.in_features, layer.out_features) == (128, 64)
