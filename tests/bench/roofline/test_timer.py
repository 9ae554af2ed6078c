"""Operators are timed without inner operators, and without the time of the hooks."""

import pytest
from torch import nn

from graftlm.bench.roofline.operators import Operator
from graftlm.bench.roofline.timer import OperatorTimer


class Clock:
    """A clock that modules advance; each mark takes one second, as in a hook."""

    def __init__(self):
        self.now = 0.0

    def mark(self):
        self.now += 1.0
        return self.now

    def sync(self):
        pass

    def seconds(self, start, end):
        return end - start


class Works(nn.Module):
    """Advances the clock by some seconds, in addition to the time of inner modules."""

    def __init__(self, clock, seconds, *inside):
        super().__init__()
        self._clock, self._seconds = clock, seconds
        self.inside = nn.ModuleList(inside)

    def forward(self):
        self._clock.now += self._seconds
        for module in self.inside:
            module()


@pytest.fixture
def clock():
    return Clock()


def test_an_operators_time_excludes_inner_operators(clock):
    inner, unhooked = Works(clock, 100.0), Works(clock, 40.0)
    outer = Works(clock, 1000.0, inner, unhooked, inner)
    timer = OperatorTimer(clock)
    with timer.attached([Operator("outer", outer), Operator("inner", inner)]), timer.span("rest"):
        clock.now += 5.0
        outer()
    # For an empty call, this clock counts one second between two marks.
    assert timer.take() == {"inner": 200.0 + 2, "outer": 1040.0 + 3, "rest": 5.0 + 2}


def test_hooks_are_removed_at_the_end_of_the_block(clock):
    module = Works(clock, 100.0)
    timer = OperatorTimer(clock)
    with timer.attached([Operator("a", module)]):
        module()
    assert timer.take() == {"a": 101.0}
    module()
    assert timer.take() == {}
    assert not module._forward_hooks
    assert not module._forward_pre_hooks
