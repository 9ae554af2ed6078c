import numpy as np
import pytest

from graftlm.execution.noise import uniform


def _uniform(seeds, positions):
    return uniform(np.array(seeds, dtype=np.uint64), np.array(positions, dtype=np.int64))


def test_a_number_depends_on_its_seed_and_position_only():
    alone = [_uniform([seed], [position])[0] for seed, position in ((7, 0), (7, 1), (2**63 - 1, 5))]
    together = _uniform([7, 7, 2**63 - 1], [0, 1, 5])
    assert together.tolist() == alone
    assert len(set(alone)) == 3


def test_numbers_are_those_of_the_published_generator():
    # SplitMix64 started at 0 gives these first outputs; a seed's sequence starts at its first output.
    first = 0xE220A8397B1DCDAF
    gamma, mask = 0x9E3779B97F4A7C15, 2**64 - 1

    def mix(z):
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        return z ^ (z >> 31)

    assert mix(gamma) == first
    assert _uniform([0], [0])[0] == (mix((first + gamma) & mask) >> 11) / 2**53


@pytest.mark.parametrize("vary", ["positions", "seeds"])
def test_numbers_are_uniform_and_uncorrelated_along(vary):
    n = 200_000
    fixed, varied = np.full(n, 3), np.arange(n)
    u = _uniform(fixed, varied) if vary == "positions" else _uniform(varied, fixed)
    assert u.min() >= 0.0
    assert u.max() < 1.0
    counts = np.bincount((u * 256).astype(int), minlength=256)
    chi_square = ((counts - n / 256) ** 2 / (n / 256)).sum()
    assert 170 < chi_square < 350  # 255 degrees of freedom: mean 255, standard deviation 22.6
    assert abs(np.corrcoef(u[:-1], u[1:])[0, 1]) < 0.01
