import pytest
from hypothesis import given
from hypothesis import strategies as st

from graftlm.speculation.acceptance import Acceptance


def test_an_unknown_drafter_is_taken_at_its_word():
    assert Acceptance().probability(0, "suffix", 0.7) == 0.7


@pytest.mark.parametrize(("num_accepted", "expected"), [(0, 0.0), (8, 1.0)])
def test_what_is_observed_outweighs_the_drafters_word(num_accepted, expected):
    acceptance = Acceptance()
    for _ in range(60):
        acceptance.observe(0, "suffix", 0.5, 8, num_accepted)
    assert acceptance.probability(0, "suffix", 0.5) == pytest.approx(expected, abs=0.05)


@pytest.mark.parametrize(("num_accepted", "expected"), [(0, 0.0), (1, 0.5), (3, 0.75), (8, 1.0)])
def test_tokens_after_the_first_rejected_one_were_not_tried(num_accepted, expected):
    acceptance = Acceptance()
    for _ in range(200):
        acceptance.observe(0, "suffix", 0.5, 8, num_accepted)
    assert acceptance.probability(0, "suffix", 0.5) == pytest.approx(expected, abs=0.1)


def test_a_new_request_is_expected_to_be_like_the_others():
    acceptance = Acceptance()
    for row in range(50):
        acceptance.observe(row, "suffix", 0.5, 8, 0)
    assert acceptance.probability(99, "suffix", 0.5) < 0.1


def test_drafters_and_confidences_are_learned_apart():
    acceptance = Acceptance()
    for row in range(50):
        acceptance.observe(row, "suffix", 0.9, 4, 0)
    assert acceptance.probability(99, "radix", 0.9) == 0.9
    assert acceptance.probability(99, "suffix", 0.3) == 0.3
    assert acceptance.probability(99, "suffix", 0.9) < 0.2


def test_a_request_has_its_own_rate():
    acceptance = Acceptance()
    for _ in range(10):
        acceptance.observe(1, "suffix", 0.5, 4, 4)
        acceptance.observe(2, "suffix", 0.5, 4, 0)
    assert acceptance.probability(1, "suffix", 0.5) > 0.85
    assert acceptance.probability(2, "suffix", 0.5) < 0.25
    assert acceptance.probability(2, "suffix", 0.5) < acceptance.probability(3, "suffix", 0.5)


def test_a_closed_row_is_forgotten():
    acceptance = Acceptance()
    for _ in range(10):
        acceptance.observe(1, "suffix", 0.5, 4, 0)
    before = acceptance.probability(1, "suffix", 0.5)
    acceptance.close(1)
    acceptance.close(7)
    assert acceptance.probability(1, "suffix", 0.5) == acceptance.probability(2, "suffix", 0.5) > before


def test_what_happened_lately_counts_most():
    acceptance = Acceptance()
    for _ in range(50):
        acceptance.observe(1, "suffix", 0.5, 4, 0)
    for _ in range(8):
        acceptance.observe(1, "suffix", 0.5, 4, 4)
    assert acceptance.probability(1, "suffix", 0.5) > 0.7


@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.sampled_from("ab"), st.floats(0, 1), st.integers(1, 9), st.integers(0, 9)),
        max_size=30,
    ),
    st.floats(0, 1),
)
def test_an_estimate_is_a_probability(observed, confidence):
    acceptance = Acceptance()
    for row, drafter, before, num_drafted, num_accepted in observed:
        acceptance.observe(row, drafter, before, num_drafted, min(num_accepted, num_drafted))
    for row in range(4):
        assert 0.0 <= acceptance.probability(row, "a", confidence) <= 1.0 + 1e-9
