import numpy as np
import pytest
import torch

from graftlm.execution.noise import exponential, noise_keys

MASK = 2**64 - 1
GAMMA = 0x9E3779B97F4A7C15


def keys(seeds, positions):
    return noise_keys(np.array(seeds, dtype=np.uint64), np.array(positions, dtype=np.int64))


def mix(z):
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def test_the_reference_implementation_is_splitmix64():
    assert mix(GAMMA) == 0xE220A8397B1DCDAF  # the first output of SplitMix64 with start 0


def test_a_key_depends_only_on_seed_and_position():
    alone = [keys([seed], [position])[0] for seed, position in ((7, 0), (7, 1), (2**63 - 1, 5))]
    assert keys([7, 7, 2**63 - 1], [0, 1, 5]).tolist() == alone
    assert len(set(alone)) == 3


@pytest.mark.parametrize(("seed", "position"), [(0, 0), (1, 0), (12345, 678), (2**63 - 1, 2**40)])
def test_numbers_equal_those_of_splitmix64(seed, position):
    key = mix((mix((seed + GAMMA) & MASK) + (position + 1) * GAMMA) & MASK)
    assert int(keys([seed], [position]).view(np.uint64)[0]) == key
    uniform = [((mix((key + (j + 1) * GAMMA) & MASK) >> 11) + 0.5) / 2**53 for j in range(50)]
    drawn = exponential(torch.from_numpy(keys([seed], [position])), 50)
    np.testing.assert_allclose(drawn[0].numpy(), -np.log(uniform), rtol=1e-12)


@pytest.mark.parametrize("along", ["seeds", "positions", "places"])
def test_numbers_are_exponential_and_uncorrelated(along):
    n = 200_000
    fixed, varied = np.full(n, 3), np.arange(n)
    if along == "places":
        noise = exponential(torch.from_numpy(keys([3], [3])), n)[0].numpy()
    else:
        pairs = (varied, fixed) if along == "seeds" else (fixed, varied)
        noise = exponential(torch.from_numpy(keys(*pairs)), 1)[:, 0].numpy()
    assert noise.min() > 0
    uniform = np.exp(-noise)
    counts = np.bincount((uniform * 256).astype(int), minlength=256)
    chi_square = ((counts - n / 256) ** 2 / (n / 256)).sum()
    assert 170 < chi_square < 350  # 255 degrees of freedom: mean 255, standard deviation 22.6
    assert abs(np.corrcoef(uniform[:-1], uniform[1:])[0, 1]) < 0.01
