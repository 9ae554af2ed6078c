"""The history of the last minutes: rates and gauges, one point per second, and replicas that restart."""

import pytest

from graftlm.processes.messages import Load
from graftlm.processes.replicas import Replica
from graftlm.records import EngineStats
from graftlm.server.dashboard.history import History


class Clock:
    def __init__(self):
        self.now_s = 100.0

    def __call__(self):
        return self.now_s


def report(replica, **values):
    stats = EngineStats(
        **dict.fromkeys(EngineStats.__dataclass_fields__, 0) | {"tiers": None, "states": None, "drafts": {}} | values
    )
    replica.load = Load(process=replica.name, stats=stats, histograms={})


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def replicas():
    replicas = [Replica("scheduler-0"), Replica("scheduler-1")]
    for replica in replicas:
        report(replica)
    return replicas


@pytest.fixture
def history(replicas, clock):
    return History(replicas, clock)


def tick(history, clock, seconds=1.0):
    """Move the clock on, record a point and return it."""
    clock.now_s += seconds
    history.sample()
    return history.after(0)[-1]


def test_rates_and_gauges_are_summed_over_all_replicas(history, replicas, clock):
    report(replicas[0], steps=1, generated_tokens=30, running_requests=2, free_pages=5)
    report(replicas[1], steps=1, generated_tokens=10, running_requests=1, free_pages=7)
    point = tick(history, clock)
    assert (point.generated_tokens_per_s, point.running_requests, point.free_pages) == (40, 3, 12)


def test_counts_from_before_the_history_are_not_part_of_a_rate(replicas, clock):
    report(replicas[0], steps=9, prompt_tokens=1000)
    history = History(replicas, clock)
    assert tick(history, clock).prompt_tokens_per_s == 0


def test_a_rate_is_the_difference_of_two_points(history, replicas, clock):
    report(replicas[0], steps=1, prompt_tokens=60)
    assert tick(history, clock).prompt_tokens_per_s == 60
    assert tick(history, clock).prompt_tokens_per_s == 30
    assert tick(history, clock).prompt_tokens_per_s == 0


def test_a_restarted_replica_adds_its_counts_since_the_restart(history, replicas, clock):
    report(replicas[0], steps=50, generated_tokens=500)
    tick(history, clock)
    replicas[0].load = None
    assert [tick(history, clock).generated_tokens_per_s for _ in range(2)] == [250, 0]
    report(replicas[0], steps=2, generated_tokens=20)
    assert tick(history, clock).generated_tokens_per_s == 10


def test_a_restart_between_two_points_does_not_lower_a_rate(history, replicas, clock):
    report(replicas[0], steps=50, generated_tokens=500)
    for _ in range(3):
        tick(history, clock)
    report(replicas[0], steps=2, generated_tokens=20)
    assert tick(history, clock).generated_tokens_per_s == 10


@pytest.mark.parametrize(
    ("prompt_tokens", "cached_tokens", "rate"),
    [(0, 0, None), (100, 0, 0.0), (100, 75, 0.75), (100, 120, 1.0)],
    ids=["no prompts", "nothing found", "some found", "found for prompts that came long before"],
)
def test_the_hit_rate_is_the_share_of_cached_prompt_tokens(
    history, replicas, clock, prompt_tokens, cached_tokens, rate
):
    report(replicas[0], steps=1, prompt_tokens=prompt_tokens, cached_tokens=cached_tokens)
    assert tick(history, clock).hit_rate == rate


def test_the_hit_rate_covers_the_last_30_seconds(history, replicas, clock):
    report(replicas[0], steps=1, prompt_tokens=100, cached_tokens=50)
    rates = [tick(history, clock).hit_rate for _ in range(32)]
    assert rates[29] == 0.5
    assert rates[31] is None


@pytest.mark.parametrize(
    ("generated", "jump_forward", "drafts", "expected"),
    [
        (0, 0, {}, None),
        (40, 0, {}, 1.0),
        (40, 20, {}, 2.0),
        (40, 0, {"radix": (50, 20), "suffix": (9, 10)}, 4.0),
    ],
    ids=["nothing generated", "plain", "jump-forward", "two drafters"],
)
def test_tokens_per_step_count_those_that_needed_no_step(
    history, replicas, clock, generated, jump_forward, drafts, expected
):
    report(replicas[1], steps=1, generated_tokens=generated, jump_forward_tokens=jump_forward, drafts=drafts)
    assert tick(history, clock).tokens_per_step == expected


def test_five_minutes_are_kept(history, clock):
    for _ in range(400):
        tick(history, clock)
    points = history.after(0)
    assert len(points) == 300
    assert points[-1].time_s - points[0].time_s == 299


def test_points_after_a_time_can_be_requested(history, clock):
    for _ in range(5):
        tick(history, clock)
    assert [point.time_s for point in history.after(103.0)] == [104.0, 105.0]
    assert history.after(105.0) == []


def test_latencies_are_percentiles_of_the_last_10_seconds(history, clock):
    assert tick(history, clock).first_token_p50_s is None
    for seconds in (0.1, 0.2, 0.3, 4.0):
        history.latencies.first_token(seconds)
    history.latencies.more_tokens(0.08, 4)
    history.latencies.more_tokens(0.5, 1)
    for _ in range(10):
        point = tick(history, clock)
        assert point.first_token_p50_s == pytest.approx(0.2, rel=0.05)
        assert point.first_token_p95_s == pytest.approx(4.0, rel=0.05)
        assert point.inter_token_p50_s == pytest.approx(0.02, rel=0.05)
        assert point.inter_token_p95_s == pytest.approx(0.5, rel=0.05)
    assert tick(history, clock).inter_token_p95_s is None
