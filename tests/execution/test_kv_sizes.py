from dataclasses import replace

import pytest
import torch

from graftlm.contracts import AttentionLayer
from graftlm.errors import ConfigError
from graftlm.execution.kv_sizes import KVDemand, KVSizes, size_kv
from graftlm.memory import WindowSpan

FULL = AttentionLayer(layer_id=0, num_heads=2, num_kv_heads=1, head_dim=32, scale=1.0)  # 256 bytes per token
LATENT = replace(FULL, value_prefix_dim=24)  # half of the size: only keys
WINDOWED = replace(FULL, layer_id=1, sliding_window=8)
SPAN = WindowSpan(window_tokens=8, page_size=4)  # 5 window pages per row
DEMAND = KVDemand(
    kv_tokens=None,
    window_tokens=None,
    kv_fraction=0.5,
    free_bytes=2 << 20,
    page_size=4,
    num_rows=10,
    context_len=4096,
    prefill_tokens=64,
)


@pytest.mark.parametrize(
    ("layers", "changes", "num_pages", "num_window_pages"),
    [
        ([FULL], {}, 1024, None),
        ([FULL, WINDOWED], {}, 512, None),
        ([LATENT], {}, 2048, None),
        ([FULL], {"context_len": 40}, 100, None),
        ([FULL], {"context_len": 41}, 110, None),
        ([FULL], {"kv_tokens": 400}, 100, None),
        ([FULL], {"kv_tokens": 403}, 100, None),
        # 10 rows x 5 + 64 / 4 = 66 window pages, and a quarter of the pages
        ([FULL, WINDOWED], {"span": SPAN}, 766, 257),
        ([FULL, WINDOWED], {"span": SPAN, "kv_tokens": 4000}, 1000, 316),
        ([FULL, WINDOWED], {"span": SPAN, "kv_tokens": 200}, 50, 50),
        ([FULL, WINDOWED], {"span": SPAN, "kv_tokens": 4000, "window_tokens": 240}, 1000, 60),
        ([FULL, WINDOWED], {"span": SPAN, "window_tokens": 1024}, 768, 256),
        ([FULL, WINDOWED], {"span": SPAN, "window_tokens": 1 << 20}, 512, 512),
        ([WINDOWED], {"span": SPAN}, 3832, 1024),
        ([WINDOWED], {"span": SPAN, "window_tokens": 1024}, 10240, 256),
        ([FULL, WINDOWED], {"span": SPAN, "free_bytes": 1 << 14}, 4, 4),
        ([FULL], {"reserved_bytes": 1 << 20}, 1024, None),
        ([FULL], {"reserved_bytes": 3 << 19}, 512, None),
        ([FULL], {"reserved_bytes": 1 << 20, "kv_fraction": 0.9}, 1024, None),
    ],
)
def test_memory_is_divided_as_configured_or_as_it_fits(layers, changes, num_pages, num_window_pages):
    assert size_kv(layers, torch.float32, replace(DEMAND, **changes)) == KVSizes(num_pages, num_window_pages)


@pytest.mark.parametrize(
    ("head_dim", "plain", "gain"),
    [(128, torch.bfloat16, 1.97), (64, torch.bfloat16, 1.94), (64, torch.float32, 3.88)],
)
def test_about_twice_the_tokens_fit_with_8_bit_types(head_dim, plain, gain):
    layers, demand = [replace(FULL, head_dim=head_dim)], replace(DEMAND, free_bytes=8 << 20)
    sizes = [size_kv(layers, dtype, demand).num_pages for dtype in (plain, torch.int8)]
    assert sizes[1] / sizes[0] == pytest.approx(gain, abs=0.01)


def test_derived_sizes_fit_the_memory():
    for free_bytes in range(1 << 14, 1 << 22, 99_999):
        sizes = size_kv([FULL, WINDOWED], torch.float32, replace(DEMAND, span=SPAN, free_bytes=free_bytes))
        assert (sizes.num_pages + sizes.num_window_pages) * 4 * 256 <= free_bytes // 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"free_bytes": 1000}, "too small for one KV page of 1024 bytes"),
        ({"span": SPAN, "kv_tokens": 4000, "window_tokens": 16}, r"window_tokens is 16, .* may need 20 tokens"),
    ],
)
def test_memory_too_small_for_one_request_is_refused(changes, message):
    layers = [FULL, WINDOWED] if "span" in changes else [FULL]
    with pytest.raises(ConfigError, match=message):
        size_kv(layers, torch.float32, replace(DEMAND, **changes))
