"""Options that contradict each other are refused with the required change."""

import numpy as np
import pytest
from pydantic import ValidationError

from graftlm.contracts import CacheContext
from graftlm.errors import ConfigError
from graftlm.memory import TransferQueue
from graftlm.testing.recording import OldestAccessFirst, TickingClock
from graftlm_cache.hicache.create import create_hicache
from graftlm_cache.hicache.options import HicacheOptions

PAGE_BYTES = 1024


def make(page_size=16, **options):
    queue = TransferQueue(
        PAGE_BYTES, "float32", page_size, lambda n, pages: np.zeros((n, pages * PAGE_BYTES), dtype=np.uint8)
    )
    context = CacheContext(page_size, OldestAccessFirst(), TickingClock(), transfer=queue)
    return create_hicache(HicacheOptions(**options), context).tier_stats


@pytest.mark.parametrize(
    ("page_size", "options", "block_tokens", "host_blocks"),
    [
        (16, {"host_tokens": 1000}, 64, 15),
        (1, {"host_tokens": 1000, "block_tokens": 10}, 10, 100),
        (128, {"host_tokens": 1000}, 128, 7),
        (48, {"host_tokens": 1000}, 96, 10),
        (16, {"host_gib": 2**-10}, 64, 256),
    ],
)
def test_sizes_follow_from_options(page_size, options, block_tokens, host_blocks):
    stats = make(page_size, **options)
    assert (stats.block_tokens, stats.host_blocks) == (block_tokens, host_blocks)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_tokens": 40}, "block_tokens is 40, which is not a multiple of cache.page_size 16. Set it to 48"),
        ({"host_tokens": 63}, "host_tokens 63 is less than one block of 64 tokens"),
        ({"host_gib": 1e-9}, "host_gib 1e-09 is less than one block"),
    ],
)
def test_contradictory_sizes_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        make(**options)


@pytest.mark.parametrize(
    "options",
    [
        {"write_policy": "sometimes"},
        {"write_policy": "write_back", "min_uses": 3},
        {"host_tokens": 0},
        {"storage": {}},
        {"storage": {"name": "file", "prefetch": "maybe"}},
        {"storage": {"name": "file", "prefetch_timeout_s": 0}},
    ],
)
def test_invalid_options_are_refused(options):
    with pytest.raises(ValidationError):
        HicacheOptions(**options)
