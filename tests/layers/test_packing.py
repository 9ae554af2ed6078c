"""Weights in the CPU's blocked layout give the same products as plain weights."""

import pytest
import torch
import torch.nn.functional as F

from graftlm.layers import Linear, TokenEmbedding
from graftlm.layers.ops import NativeOps, TorchOps
from graftlm.layers.packing import can_pack, linear, pack_for_onednn

CPU = torch.device("cpu")
#: Relative to the largest result: rounding of the last bit, and of sums in another order.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def assert_close(got, expected):
    assert got.dtype == expected.dtype
    assert got.shape == expected.shape
    worst = (got.float() - expected.float()).abs().max() / expected.float().abs().max()
    assert worst <= TOLERANCE[got.dtype]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("rows", "size", "out"), [(1, 512, 768), (3, 1000, 400), (17, 399, 1001), (3, 24, 7)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_packing_changes_no_product(dtype, rows, size, out, has_bias):
    torch.manual_seed(0)
    x, weight = torch.randn(rows, size).to(dtype), torch.randn(out, size).to(dtype)
    bias = torch.randn(out).to(dtype) if has_bias else None
    assert_close(linear(x, weight, pack_for_onednn(weight), bias), F.linear(x, weight, bias))


@pytest.mark.parametrize("x", [torch.randn(4, 3, 512), torch.randn(512, 5).t(), torch.randn(5, 600)[:, :512]])
def test_inputs_may_have_any_strides_and_leading_dimensions(x):
    weight = torch.randn(800, 512)
    assert_close(linear(x, weight, pack_for_onednn(weight)), F.linear(x, weight))


@pytest.mark.skipif(not can_pack(torch.float32), reason="oneDNN's packed products are of x86")
def test_unpacking_returns_the_original_weight():
    weight = torch.randn(800, 512)
    packed = pack_for_onednn(weight)
    assert packed is not None
    assert torch.equal(packed.plain(), weight)


def test_other_dtypes_are_not_packed():
    assert pack_for_onednn(torch.randn(800, 512, dtype=torch.float64)) is None


@pytest.fixture(scope="module")
def native_ops(kernel_cache):
    return NativeOps.load("g++", kernel_cache)


@pytest.fixture(params=["torch", "native"])
def ops(request):
    return TorchOps() if request.param == "torch" else request.getfixturevalue("native_ops")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_packed_layer_can_be_packed_twice_and_loaded_again(ops, dtype):
    layer = Linear(512, {"q": 300, "k": 600}, bias=True, device=CPU, dtype=dtype)
    layer.use_ops(ops)
    x = torch.randn(3, 512).to(dtype)
    for _ in range(2):
        weight, bias = torch.randn(900, 512).to(dtype), torch.randn(900).to(dtype)
        parts = {"q.weight": weight[:300], "k.weight": weight[300:], "q.bias": bias[:300], "k.bias": bias[300:]}
        for slot in layer.weight_slots(""):
            slot.target.copy_(parts[slot.name])
        layer.pack()
        layer.pack()
        assert_close(layer(x), F.linear(x, weight, bias))
        assert torch.equal(next(iter(layer.weight_slots(""))).target, weight[:300])
        layer.pack()
        assert_close(layer(x), F.linear(x, weight, bias))


def test_a_tied_embedding_keeps_its_rows_and_packs_its_output():
    embed = TokenEmbedding(900, 512, device=CPU, dtype=torch.float32)
    hidden = torch.randn(3, 512)
    for _ in range(2):
        weight = torch.randn(900, 512)
        (slot,) = embed.weight_slots("", "embed")
        slot.target.copy_(weight)
        embed.pack_output()
        assert torch.equal(embed(torch.tensor([7, 0])), weight[[7, 0]])
        assert_close(embed.logits(hidden), F.linear(hidden, weight))
