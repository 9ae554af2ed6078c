"""A mixture of experts equals a loop over tokens, with a number of Python calls that is independent of the tokens."""

import sys

import pytest
import torch

from graftlm.errors import UnsupportedArchitectureError
from graftlm.layers import Experts, GroupedLinear, MoE, Router, Routing, RowGroups, pack_linears, softmax_top_k
from graftlm.layers.grouped_linear import grouped_product
from graftlm.layers.weights import copy_weights

CPU = torch.device("cpu")
HIDDEN, SIZE = 16, 12


def clamped(gate_up):
    """Alternating gate and up columns with clamping, as in some checkpoints."""
    gate, up = gate_up[..., ::2].clamp(max=1.0), gate_up[..., 1::2].clamp(-1.0, 1.0)
    return gate * torch.sigmoid(1.7 * gate) * (up + 1)


def silu_gate(gate_up):
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def make_experts(num_experts, act="silu", bias=False, hidden=HIDDEN, size=SIZE, dtype=torch.float32):
    generator = torch.Generator().manual_seed(num_experts)
    experts = Experts(num_experts, hidden, size, act, bias=bias, device=CPU, dtype=dtype)
    for parameter in experts.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) / hidden**0.5)
    return experts


def make_router(num_experts, choose, hidden=HIDDEN):
    router = Router(hidden, num_experts, choose, device=CPU, dtype=torch.float32)
    router.weight.copy_(torch.randn(router.weight.shape, generator=torch.Generator().manual_seed(1)))
    return router


def token_by_token(experts, x, routing, act):
    """Compute the layer with plain loops."""
    out = torch.zeros_like(x)
    for t, (expert_ids, weights) in enumerate(zip(routing.expert_ids.tolist(), routing.weights, strict=True)):
        for e, weight in zip(expert_ids, weights, strict=True):
            gate_up = x[t] @ experts.gate_up.weight[e].T
            if experts.gate_up.bias is not None:
                gate_up = gate_up + experts.gate_up.bias[e]
            down = act(gate_up) @ experts.down.weight[e].T
            if experts.down.bias is not None:
                down = down + experts.down.bias[e]
            out[t] += weight * down
    return out


@pytest.mark.parametrize("num_tokens", [1, 2, 37])
@pytest.mark.parametrize(
    ("num_experts", "top_k", "renormalise", "act", "bias"),
    [
        (3, 2, True, "silu", False),
        (3, 3, False, "silu", False),
        (1, 1, True, "silu", False),
        (40, 4, False, "silu", True),
        (5, 2, True, clamped, True),
    ],
)
def test_experts_equal_a_loop_over_tokens(num_experts, top_k, renormalise, act, bias, num_tokens):
    experts = make_experts(num_experts, act, bias)
    router = make_router(num_experts, softmax_top_k(top_k, renormalise=renormalise))
    x = torch.randn(num_tokens, HIDDEN, generator=torch.Generator().manual_seed(2))
    expected = token_by_token(experts, x, router(x), silu_gate if act == "silu" else act)
    torch.testing.assert_close(MoE(router, experts)(x), expected)


def test_python_calls_do_not_depend_on_the_number_of_tokens():
    moe = MoE(make_router(3, softmax_top_k(2, renormalise=True)), make_experts(3))
    x = torch.randn(512, HIDDEN)
    # with 32 tokens, all experts already have tokens
    assert len(set(moe.router(x[:32]).expert_ids.flatten().tolist())) == 3
    assert count_calls(moe, x[:32]) == count_calls(moe, x)


def count_calls(module, x):
    """Count calls of Python and C functions."""
    calls = 0

    def profile(frame, event, arg):
        nonlocal calls
        calls += event in ("call", "c_call")

    previous = sys.getprofile()
    sys.setprofile(profile)
    try:
        module(x)
    finally:
        sys.setprofile(previous)
    return calls


@pytest.mark.parametrize("bias", [False, True])
def test_grouped_mm_equals_one_product_per_expert(bias):
    layer = GroupedLinear(5, HIDDEN, SIZE, ("a",), bias=bias, device=CPU, dtype=torch.float32)
    for parameter in layer.parameters():
        parameter.copy_(torch.randn(parameter.shape))
    groups = RowGroups.of(torch.tensor([0, 0, 2, 2, 2, 4]), num_experts=5)
    x = torch.randn(6, HIDDEN)
    torch.testing.assert_close(grouped_product(x, layer.weight, layer.bias, groups), layer(x, groups))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("size", [16, 12])  # by one kernel, and one expert after the other
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_gpu_computes_the_same_as_a_cpu(dtype, size):
    moe = MoE(make_router(5, softmax_top_k(2, renormalise=True)), make_experts(5, size=size, dtype=dtype))
    x = torch.randn(37, HIDDEN, dtype=dtype)
    routing = moe.router(x)
    expected = moe.experts(x, routing)
    on_device = Routing(routing.expert_ids.cuda(), routing.weights.cuda())
    torch.testing.assert_close(moe.experts.cuda()(x.cuda(), on_device).cpu(), expected, rtol=2e-2, atol=2e-2)


def test_experts_without_tokens_are_not_multiplied():
    experts = make_experts(8)
    experts.gate_up.weight[1:] = experts.down.weight[1:] = torch.nan
    router = make_router(8, softmax_top_k(1, renormalise=True))
    router.weight.zero_()
    router.weight[0] = 1.0
    out = MoE(router, experts)(torch.ones(4, HIDDEN))
    assert out.isfinite().all()


@pytest.mark.parametrize(
    ("renormalise", "scale", "expected"),
    [(False, 1.0, [0.5, 0.3]), (True, 1.0, [0.625, 0.375]), (False, 2.0, [1.0, 0.6]), (True, 2.0, [1.25, 0.75])],
)
def test_softmax_top_k_weights_by_probability(renormalise, scale, expected):
    routing = softmax_top_k(2, renormalise=renormalise, scale=scale)(torch.tensor([[0.2, 0.5, 0.3]]).log())
    assert routing.expert_ids.tolist() == [[1, 2]]
    torch.testing.assert_close(routing.weights, torch.tensor([expected]))


def test_packed_experts_compute_the_same_and_can_be_loaded_again():
    hidden, size = 512, 1024  # large enough to be packed, if the CPU gains from it
    experts = make_experts(2, hidden=hidden, size=size)
    moe = MoE(make_router(2, softmax_top_k(1, renormalise=True), hidden), experts)
    x = torch.randn(9, hidden)
    plain, weight = moe(x), experts.gate_up.weight.clone()
    pack_linears(moe)
    torch.testing.assert_close(moe(x), plain, rtol=1e-4, atol=1e-4)
    slots = [*experts.weight_slots("experts.")]
    assert {slot.shape for slot in slots} == {(size, hidden), (hidden, size)}
    copy_weights(slots, [(slot.name, torch.ones(slot.shape)) for slot in slots])
    assert experts.gate_up.weight.shape == weight.shape
    assert (experts.gate_up.weight == 1).all()


@pytest.mark.parametrize("transposed", [False, True])
def test_stacked_and_single_tensors_give_the_same_experts(transposed):
    source, single, stacked = (make_experts(n, bias=True) for n in (3, 3, 3))
    singles = [(slot.name, slot.target.clone()) for slot in source.weight_slots("e.", gate="w1", up="w3", down="w2")]
    assert [name for name, _ in singles[:3]] == ["e.0.w1.weight", "e.0.w1.bias", "e.0.w3.weight"]
    stacks = [(slot.name, slot.target.clone()) for slot in source.stacked_slots("e.", transposed=transposed)]
    assert dict(stacks)["e.down_proj"].shape == ((3, SIZE, HIDDEN) if transposed else (3, HIDDEN, SIZE))
    for experts, slots, weights in (
        (single, single.weight_slots("e.", gate="w1", up="w3", down="w2"), singles),
        (stacked, stacked.stacked_slots("e.", transposed=transposed), stacks),
    ):
        for parameter in experts.parameters():
            parameter.zero_()
        copy_weights(slots, weights)
        for mine, theirs in zip(experts.parameters(), source.parameters(), strict=True):
            assert torch.equal(mine, theirs)


def test_an_unknown_activation_is_refused():
    with pytest.raises(UnsupportedArchitectureError, match="'tanhh'"):
        make_experts(2, act="tanhh")
