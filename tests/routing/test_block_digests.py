import numpy as np
import pytest

from graftlm.routing import BlockDigests


def random_tokens(num_tokens, seed=0):
    return np.random.default_rng(seed).integers(0, 150_000, num_tokens, dtype=np.int32)


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(0, 0), (1, 0), (15, 0), (16, 1), (31, 1), (160, 10)])
def test_only_whole_blocks_have_a_digest(num_tokens, num_blocks):
    assert len(BlockDigests(16).of_prompt(random_tokens(num_tokens), "")) == num_blocks


def test_equal_prefixes_have_equal_digests_and_others_do_not():
    digests, tokens = BlockDigests(16), random_tokens(160)
    changed = tokens.copy()
    changed[70] += 1
    one, other = digests.of_prompt(tokens, ""), digests.of_prompt(changed, "")
    assert one[:4] == other[:4]
    assert not set(one[4:]) & set(other)


def test_namespaces_and_positions_change_digests():
    digests, tokens = BlockDigests(16), random_tokens(64)
    swapped = np.concatenate([tokens[16:32], tokens[:16], tokens[32:]])
    sets = [set(digests.of_prompt(*prompt)) for prompt in ((tokens, ""), (tokens, "a"), (tokens, "b"), (swapped, ""))]
    found = set.union(*sets)
    assert len(found) == 4 * 4


@pytest.mark.parametrize("block_tokens", [1, 2, 64])
def test_a_sequence_is_hashed_piece_by_piece(block_tokens):
    digests, tokens = BlockDigests(block_tokens), random_tokens(256)
    whole, before, found = digests.of_prompt(tokens, "n"), digests.start("n"), []
    for first in range(0, 256, 64):
        found += digests.extend(tokens[first : first + 64], first // block_tokens, before).tolist()
        before = found[-1]
    assert found == whole


def test_many_random_blocks_have_different_digests():
    digests = BlockDigests(2)
    tokens = np.arange(60_000, dtype=np.int32)
    assert len(set(digests.of_prompt(tokens, ""))) == 30_000
    assert len(digests.extend(tokens, 4000, 5)) == 30_000
    firsts = {digests.of_prompt(np.array([0, token], dtype=np.int32), "")[0] for token in range(0, 2_000_000, 1024)}
    assert len(firsts) == 1954
