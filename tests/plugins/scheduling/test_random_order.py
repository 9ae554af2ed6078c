from graftlm.contracts import SchedulingContext, SchedulingPolicy
from graftlm.testing import FakeWaitingRequest, SchedulingPolicyConformance
from graftlm_scheduling.options import RandomOrderOptions
from graftlm_scheduling.random_order import RandomOrder

WAITING = [FakeWaitingRequest(str(idx)) for idx in range(20)]


class TestRandomOrder(SchedulingPolicyConformance):
    def create(self, context: SchedulingContext) -> SchedulingPolicy:
        return RandomOrder(RandomOrderOptions(), context.seed)


def order(seed: int, now: float, option: int | None = None) -> list[FakeWaitingRequest]:
    return RandomOrder(RandomOrderOptions(seed=option), seed).order(WAITING, now)


def test_each_time_and_each_seed_has_another_order():
    orders = [order(0, 1.0), order(0, 2.0), order(1, 1.0), WAITING]
    assert all(one != other for i, one in enumerate(orders) for other in orders[:i])


def test_every_request_is_first_about_equally_often():
    first = [order(0, float(moment))[0].request_id for moment in range(2000)]
    assert all(60 < first.count(request.request_id) < 145 for request in WAITING)


def test_the_option_overrides_the_engines_seed():
    assert order(0, 1.0, option=7) == order(7, 1.0)
