"""Equal keys mean equal tokens from the start of the prompt, in one namespace."""

import numpy as np
import pytest

from graftlm.contracts import PrefixKey
from graftlm_cache.hicache.block_keys import BlockKeys


def prefix(*tokens, namespace=""):
    return PrefixKey(np.array(tokens, dtype=np.int32), namespace)


def test_only_whole_blocks_have_keys():
    keys = BlockKeys(4)
    assert [len(keys.of(prefix(*range(n)))) for n in (0, 3, 4, 7, 8)] == [0, 0, 1, 1, 2]


@pytest.mark.parametrize(
    ("other", "num_shared"),
    [
        (prefix(1, 2, 3, 4), 2),
        (prefix(1, 2, 3, 5), 1),
        (prefix(9, 2, 3, 4), 0),  # the second block has the same tokens, but other tokens before it
        (prefix(1, 2, 3, 4, namespace="tenant"), 0),
        (prefix(1, 2), 1),
    ],
)
@pytest.mark.parametrize("is_remembered", [False, True])
def test_keys_are_equal_while_tokens_and_namespace_are_equal(other, num_shared, is_remembered):
    keys = BlockKeys(2)
    expected = keys.of(prefix(1, 2, 3, 4))
    found = (keys if is_remembered else BlockKeys(2)).of(other)
    assert len([a for a, b in zip(expected, found, strict=False) if a == b]) == num_shared
    assert found[:num_shared] == expected[:num_shared]


def test_remembered_keys_keep_a_copy_of_the_tokens():
    tokens = np.arange(8, dtype=np.int32)
    keys = BlockKeys(2)
    before = keys.of(PrefixKey(tokens))
    tokens[5] = 99
    after = keys.of(PrefixKey(tokens))
    assert after[:2] == before[:2]
    assert after == BlockKeys(2).of(PrefixKey(tokens))
    assert after[2:] != before[2:]


def test_keys_do_not_depend_on_the_order_of_calls():
    rng = np.random.default_rng(0)
    keys = BlockKeys(2)
    for _ in range(300):
        key = PrefixKey(rng.integers(0, 2, rng.integers(0, 12)).astype(np.int32), str(rng.integers(2)))
        assert keys.of(key) == BlockKeys(2).of(key)


def test_keys_are_the_same_in_every_process():
    [key] = BlockKeys(2).of(prefix(1, 2, namespace="tenant"))
    assert key.hex() == "5f9ad9944fea6f2508977aa2b0bb11a143e641a6f4fba5d05dde14dc5814b856"
