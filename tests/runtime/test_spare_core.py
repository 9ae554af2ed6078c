"""The CPU core that steps leave free for other computations."""

import pytest

from graftlm.runtime.spare_core import SpareCore


def test_the_core_is_in_use_until_its_last_user_leaves() -> None:
    spare_core = SpareCore(lambda: 0.0, limit_s=1.0)
    assert not spare_core.is_taken
    with spare_core.taken():
        with spare_core.taken():
            assert spare_core.is_taken
        assert spare_core.is_taken
    assert not spare_core.is_taken


def test_steps_leave_the_core_free_for_a_limited_time_after_the_last_user_came() -> None:
    now = 0.0
    spare_core = SpareCore(lambda: now, limit_s=1.0)
    with spare_core.taken():
        now = 0.9
        assert spare_core.is_taken
        now = 1.0
        assert not spare_core.is_taken
        with spare_core.taken():
            assert spare_core.is_taken
    assert not spare_core.is_taken


def test_a_user_that_fails_frees_the_core() -> None:
    spare_core = SpareCore(lambda: 0.0, limit_s=1.0)
    with pytest.raises(ValueError, match="fails"), spare_core.taken():
        raise ValueError("fails")
    assert not spare_core.is_taken


def test_a_user_that_never_ends_gets_no_more_time_when_others_come() -> None:
    now = 0.0
    spare_core = SpareCore(lambda: now, limit_s=1.0)
    with spare_core.taken():
        now = 2.0
        with spare_core.taken():
            assert spare_core.is_taken
        assert not spare_core.is_taken
