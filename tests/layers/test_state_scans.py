"""The scans in chunks and in single steps equal the recurrences, token by token, for segments of every kind."""

import pytest
import torch

from graftlm.layers.state_scans import gated_delta_rule, ssd_scan
from graftlm.testing.batches import make_state_batch

#: (first token, number of tokens, source, target); slot 0 is zero. Slot 7 is read in the step that writes it.
SEGMENTS = [(0, 1, 1, 1), (1, 1, 2, 6), (2, 70, 0, 7), (72, 5, 7, 3), (90, 3, 7, 4), (77, 13, 5, 5)]
NUM_DECODES, NUM_TOKENS, NUM_SLOTS = 2, 93, 8


def draw(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)


def states(*shape):
    state = draw(9, NUM_SLOTS, *shape)
    state[0] = 0
    return state


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


@pytest.mark.parametrize(("num_heads", "num_groups"), [(4, 1), (4, 2), (3, 3)])
def test_the_scan_equals_its_recurrence(num_heads, num_groups):
    x, g = draw(1, NUM_TOKENS, num_heads, 5), -draw(2, NUM_TOKENS, num_heads).abs()
    b, c = draw(3, NUM_TOKENS, num_groups, 6), draw(4, NUM_TOKENS, num_groups, 6)
    expected_state, state = states(num_heads, 5, 6), states(num_heads, 5, 6)
    expected = naive_ssd(x, g, b, c, expected_state)
    out = ssd_scan(x, g, b, c, state, make_state_batch(SEGMENTS, NUM_DECODES))
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(state, expected_state, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("num_heads", "num_groups"), [(4, 1), (4, 2), (3, 3)])
def test_the_gated_delta_rule_equals_its_recurrence(num_heads, num_groups):
    q, k = (torch.nn.functional.normalize(draw(seed, NUM_TOKENS, num_groups, 6), dim=-1) for seed in (1, 2))
    v, g = draw(3, NUM_TOKENS, num_heads, 5), -draw(4, NUM_TOKENS, num_heads).abs()
    beta = draw(5, NUM_TOKENS, num_heads).sigmoid()
    expected_state, state = states(num_heads, 6, 5), states(num_heads, 6, 5)
    expected = naive_delta(q, k, v, g, beta, expected_state)
    out = gated_delta_rule(q, k, v, g, beta, state, make_state_batch(SEGMENTS, NUM_DECODES))
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(state, expected_state, rtol=1e-4, atol=1e-4)


def test_strong_decays_do_not_overflow():
    x, g = draw(1, NUM_TOKENS, 2, 5), torch.full((NUM_TOKENS, 2), -300.0)
    b, c = draw(3, NUM_TOKENS, 1, 6), draw(4, NUM_TOKENS, 1, 6)
    out = ssd_scan(x, g, b, c, states(2, 5, 6), make_state_batch(SEGMENTS, NUM_DECODES))
    assert out.isfinite().all()
