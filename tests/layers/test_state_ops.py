"""PyTorch's operations and the compiled kernels equal the recurrences, token by token, for segments of every kind."""

import os
import shutil

import pytest
import torch
import torch.nn.functional as F

from graftlm.layers.kernel_build import user_cache_dir
from graftlm.layers.state_ops import NativeStateOps, TorchStateOps
from graftlm.testing.batches import make_state_batch

#: (first token, number of tokens, source, target); slot 0 is zero. Slot 7 is read in the step that writes it.
SEGMENTS = [(0, 1, 1, 1), (1, 1, 2, 6), (2, 70, 0, 7), (72, 5, 7, 3), (90, 3, 7, 4), (77, 13, 5, 5)]
NUM_DECODES, NUM_TOKENS, NUM_SLOTS = 2, 93, 8


@pytest.fixture(
    params=["torch", pytest.param("native", marks=pytest.mark.skipif(not shutil.which("g++"), reason="g++"))]
)
def ops(request):
    return TorchStateOps() if request.param == "torch" else NativeStateOps.load("g++", user_cache_dir(os.environ))


def batch():
    return make_state_batch(SEGMENTS, NUM_DECODES)


def draw(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)


def states(*shape):
    state = draw(9, NUM_SLOTS, *shape)
    state[0] = 0
    return state


def naive_conv(x, weight, bias, state, silu):
    out = torch.zeros(x.shape)
    for start, num_tokens, source, target in SEGMENTS:
        window = torch.cat((state[source], x[start : start + num_tokens]))
        for t in range(num_tokens):
            total = (window[t : t + len(weight)].float() * weight.float()).sum(0)
            total = total if bias is None else total + bias.float()
            out[start + t] = F.silu(total) if silu else total
        state[target] = window[num_tokens:]
    return out.to(x.dtype)


def naive_ssd(x, g, b, c, state):
    group = x.shape[1] // b.shape[1]
    out = torch.zeros_like(x)
    for start, num_tokens, source, target in SEGMENTS:
        current = state[source].clone()
        for t in range(start, start + num_tokens):
            for head in range(x.shape[1]):
                current[head] = current[head] * g[t, head].exp() + torch.outer(x[t, head], b[t, head // group])
                out[t, head] = current[head] @ c[t, head // group]
        state[target] = current
    return out


def naive_delta(q, k, v, g, beta, state):
    group = v.shape[1] // k.shape[1]
    out = torch.zeros_like(v)
    for start, num_tokens, source, target in SEGMENTS:
        current = state[source].clone()
        for t in range(start, start + num_tokens):
            for head in range(v.shape[1]):
                key = k[t, head // group]
                decayed = current[head] * g[t, head].exp()
                current[head] = decayed + torch.outer(key, beta[t, head] * (v[t, head] - key @ decayed))
                out[t, head] = q[t, head // group] @ current[head]
        state[target] = current
    return out


def assert_near(got, expected):
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("num_channels", "kernel_size", "has_bias", "silu"),
    [(7, 2, False, False), (64, 4, True, True), (130, 3, True, False)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_convolution_equals_its_sums(ops, num_channels, kernel_size, has_bias, silu, dtype):
    x = draw(1, NUM_TOKENS, num_channels + 5).to(dtype)[:, 3:-2]  # part of the columns of a projection
    weight = draw(2, kernel_size, num_channels).to(dtype)
    bias = draw(3, num_channels).to(dtype) if has_bias else None
    state, expected_state = (states(kernel_size - 1, num_channels).to(dtype) for _ in range(2))
    expected = naive_conv(x, weight, bias, expected_state, silu)
    out = ops.causal_conv(x, weight, bias, state, batch(), silu=silu)
    assert out.dtype is dtype
    torch.testing.assert_close(out, expected, rtol=1e-2 if dtype is torch.bfloat16 else 1e-5, atol=1e-4)
    assert torch.equal(state, expected_state)


@pytest.mark.parametrize(("num_heads", "num_groups"), [(4, 1), (4, 2), (3, 3)])
def test_the_scan_equals_its_recurrence(ops, num_heads, num_groups):
    x, g = draw(1, NUM_TOKENS, num_heads, 5), -draw(2, NUM_TOKENS, num_heads).abs()
    b, c = draw(3, NUM_TOKENS, 2, num_groups, 6).unbind(1)
    state, expected_state = states(num_heads, 5, 6), states(num_heads, 5, 6)
    expected = naive_ssd(x, g, b, c, expected_state)
    assert_near(ops.ssd_scan(x, g, b, c, state, batch()), expected)
    assert_near(state, expected_state)


@pytest.mark.parametrize(("num_heads", "num_groups"), [(4, 1), (4, 2), (3, 3)])
def test_the_gated_delta_rule_equals_its_recurrence(ops, num_heads, num_groups):
    q, k = (F.normalize(draw(seed, NUM_TOKENS, num_groups, 6), dim=-1) for seed in (1, 2))
    v, g = draw(3, NUM_TOKENS, num_heads, 5), -draw(4, NUM_TOKENS, num_heads).abs()
    beta = draw(5, NUM_TOKENS, num_heads).sigmoid()
    state, expected_state = states(num_heads, 6, 5), states(num_heads, 6, 5)
    expected = naive_delta(q, k, v, g, beta, expected_state)
    assert_near(ops.gated_delta_rule(q, k, v, g, beta, state, batch()), expected)
    assert_near(state, expected_state)


@pytest.mark.parametrize("num_heads", [24])
def test_large_heads_equal_their_recurrence_with_several_threads(ops, num_heads):
    q, k = (F.normalize(draw(seed, NUM_TOKENS, 8, 48), dim=-1) for seed in (1, 2))
    v, g = draw(3, NUM_TOKENS, num_heads, 33), -draw(4, NUM_TOKENS, num_heads).abs()
    beta = draw(5, NUM_TOKENS, num_heads).sigmoid()
    state, expected_state = states(num_heads, 48, 33), states(num_heads, 48, 33)
    expected = TorchStateOps().gated_delta_rule(q, k, v, g, beta, expected_state, batch())
    assert_near(ops.gated_delta_rule(q, k, v, g, beta, state, batch()), expected)
    assert_near(state, expected_state)


def test_strong_decays_do_not_overflow(ops):
    x, g = draw(1, NUM_TOKENS, 2, 5), torch.full((NUM_TOKENS, 2), -300.0)
    b, c = draw(3, NUM_TOKENS, 1, 6), draw(4, NUM_TOKENS, 1, 6)
    assert ops.ssd_scan(x, g, b, c, states(2, 5, 6), batch()).isfinite().all()


def test_a_wide_convolution_uses_torch(ops):
    x, weight = draw(1, NUM_TOKENS, 4), draw(2, 20, 4)
    state, expected_state = states(19, 4), states(19, 4)
    expected = naive_conv(x, weight, None, expected_state, silu=False)
    assert_near(ops.causal_conv(x, weight, None, state, batch(), silu=False), expected)
