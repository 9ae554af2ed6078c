"""Seeds of a prompt's completions."""

from graftlm.intake import completion_seed

MOST = 2**63 - 1


def test_completions_of_neighbouring_seeds_have_different_noise():
    seeds = [seed for start in (0, MOST - 100) for seed in range(start, start + 100)]
    drawn = [completion_seed(seed, index) for seed in seeds for index in range(64)]
    assert len(set(drawn)) == len(drawn)
    assert all(0 <= seed < MOST for seed in drawn)


def test_the_first_completion_has_the_given_seed():
    assert [completion_seed(seed, 0) for seed in (0, 3, MOST - 1)] == [0, 3, MOST - 1]
