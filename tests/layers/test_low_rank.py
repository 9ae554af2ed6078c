"""Products with low-rank adapters, by groups and masked, compared with a direct computation."""

import numpy as np
import pytest
import torch

from graftlm.errors import AdapterError, InvariantError
from graftlm.execution.adapter_layers import route_of
from graftlm.layers import Linear, copy_weights, pack_linears
from graftlm.layers.low_rank import AdapterMask, LowRankFactors, LowRankLayer
from graftlm_quantization import Int8Options
from graftlm_quantization.weight_only import WeightOnly

IN = 128
PARTS = {"q_proj": 24, "k_proj": 8, "v_proj": 8}
NUM_SLOTS, MAX_RANK = 3, 6

#: Slot -> projection -> rank. Slot 2 is never used.
ADAPTERS = {1: {"q_proj": 2, "v_proj": 6}, 3: {"q_proj": 5, "k_proj": 1, "v_proj": 3}}


def draw(generator, *shape):
    return torch.randn(shape, generator=generator)


@pytest.fixture(params=[None, "int8"])
def layers(request):
    """A linear layer with a bias, and the products that adapters in slots 1 and 3 add to it."""
    generator = torch.Generator().manual_seed(7)
    linear = Linear(IN, PARTS, bias=True, device=torch.device("cpu"), dtype=torch.float32)
    linear.quantize_with(WeightOnly(8, None, Int8Options(kernel="torch")) if request.param else None)
    named = {f"x.{name}.weight": draw(generator, size, IN) for name, size in PARTS.items()}
    named |= {f"x.{name}.bias": draw(generator, size) for name, size in PARTS.items()}
    copy_weights(linear.weight_slots("x."), named.items())
    pack_linears(linear)
    low_rank = LowRankLayer(linear, NUM_SLOTS, MAX_RANK)
    added = {0: torch.zeros(sum(PARTS.values()), IN), 2: torch.zeros(sum(PARTS.values()), IN)}
    for slot, ranks in ADAPTERS.items():
        factors = {
            name: LowRankFactors(draw(generator, rank, IN), draw(generator, PARTS[name], rank))
            for name, rank in ranks.items()
        }
        low_rank.set(slot, factors)
        pieces = [
            factors[n].up @ factors[n].down if n in factors else torch.zeros(size, IN) for n, size in PARTS.items()
        ]
        added[slot] = torch.cat(pieces)
    return linear, low_rank, added


def masked(of_token):
    return AdapterMask(torch.tensor([[slot == i for i in range(1, NUM_SLOTS + 1)] for slot in of_token]))


def grouped(of_token):
    slots = np.array(of_token, dtype=np.int32)
    return route_of(slots, np.ones_like(slots), NUM_SLOTS, torch.device("cpu"))


@pytest.mark.parametrize("make_route", [grouped, masked])
@pytest.mark.parametrize(
    "of_token", [[1], [3, 3, 3], [0, 0, 1, 1, 0], [1, 3, 1, 0, 3, 1], [2, 2, 3]], ids=lambda of_token: str(of_token)
)
def test_every_token_gets_the_product_of_its_adapter(layers, make_route, of_token):
    linear, low_rank, added = layers
    x = torch.randn(len(of_token), IN, generator=torch.Generator().manual_seed(1))
    plain = linear(x)
    low_rank.route(make_route(of_token))
    expected = plain + torch.stack([added[slot] @ row for slot, row in zip(of_token, x, strict=True)])
    torch.testing.assert_close(linear(x), expected, rtol=1e-4, atol=1e-3)
    low_rank.route(None)
    assert torch.equal(linear(x), plain)


@pytest.mark.parametrize("make_route", [grouped, masked])
def test_a_slot_keeps_nothing_of_the_previous_adapter(layers, make_route):
    linear, low_rank, _ = layers
    x = torch.randn(2, IN, generator=torch.Generator().manual_seed(1))
    plain = linear(x)
    low_rank.set(3, {})
    low_rank.route(make_route([3, 3]))
    torch.testing.assert_close(linear(x), plain)


@pytest.mark.parametrize("make_route", [grouped, masked])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_an_overflowing_adapter_does_not_affect_other_tokens(make_route, dtype):
    linear = Linear(IN, {"q_proj": 8}, device=torch.device("cpu"), dtype=dtype)
    linear.weight.data = torch.ones(8, IN, dtype=dtype)
    low_rank = LowRankLayer(linear, NUM_SLOTS, MAX_RANK)
    largest = torch.finfo(dtype).max
    low_rank.set(1, {"q_proj": LowRankFactors(torch.full((2, IN), largest), torch.full((8, 2), largest))})
    low_rank.set(3, {"q_proj": LowRankFactors(torch.full((1, IN), 1 / IN), torch.ones(8, 1))})
    x = torch.full((3, IN), 2, dtype=dtype)
    low_rank.route(make_route([0, 1, 3]))
    out = linear(x)
    assert not out[1].isfinite().any()
    assert (out[0].tolist(), out[2].tolist()) == ([2.0 * IN] * 8, [2.0 * IN + 2] * 8)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e39])
@pytest.mark.parametrize("make_route", [grouped, masked])
def test_factors_that_are_not_finite_are_refused(layers, make_route, value):
    linear, low_rank, added = layers
    bad = {"q_proj": LowRankFactors(torch.ones(2, IN), torch.full((24, 2), value, dtype=torch.float64))}
    with pytest.raises(AdapterError, match=r"factors of x\.\(q_proj\) are not finite in torch.float32"):
        low_rank.set(3, bad)
    x = torch.ones(3, IN)
    plain = linear(x)
    low_rank.route(make_route([0, 1, 3]))
    out = linear(x)
    torch.testing.assert_close(out - plain, torch.stack([x[0] * 0, x[0], x[0] * 0]) @ added[1].T, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("make_route", [grouped, masked])
def test_a_cleared_slot_adds_nothing(layers, make_route):
    linear, low_rank, _ = layers
    x = torch.ones(2, IN)
    plain = linear(x)
    low_rank.clear(3)
    low_rank.route(make_route([3, 3]))
    assert torch.equal(linear(x), plain)


def test_a_wrong_number_of_rows_is_an_invariant_error(layers):
    linear, low_rank, _ = layers
    low_rank.route(grouped([1, 0]))
    with pytest.raises(InvariantError, match="3 rows in a step of 2 tokens"):
        linear(torch.zeros(3, IN))


@pytest.mark.parametrize(
    ("slots", "lens", "groups", "order"),
    [
        ([2, 0, 1], [1, 1, 3], ((2, slice(0, 1)), (1, slice(2, 5))), None),
        ([2, 0, 1, 2], [1, 1, 3, 2], ((1, slice(1, 4)), (2, slice(4, 7))), [1, 2, 3, 4, 0, 5, 6]),
        ([0, 1, 0], [1, 2, 1], ((1, slice(1, 3)),), None),
        ([3, 3], [1, 2], ((3, slice(0, 3)),), None),
    ],
)
def test_tokens_are_reordered_only_if_an_adapters_tokens_are_not_adjacent(slots, lens, groups, order):
    slots, lens = np.array(slots, dtype=np.int32), np.array(lens, dtype=np.int32)
    route = route_of(slots, lens, NUM_SLOTS, torch.device("cpu"))
    assert (route.num_tokens, route.groups) == (lens.sum(), groups)
    if order is None:
        assert route.order is None
    else:
        assert route.order.tolist() == order
        assert route.order[route.inverse].tolist() == list(range(7))
