import pytest
from pydantic import ValidationError

from graftlm.contracts import EvictionContext, NodeStats
from graftlm_eviction.reuse_odds import ReuseOdds, ReuseOddsOptions


def new_strategy(total_pages: int = 10_000, **options: float | None) -> ReuseOdds:
    return ReuseOdds(ReuseOddsOptions(**options), EvictionContext(total_pages=total_pages, page_size=16))


def insert(strategy: ReuseOdds, now: float = 0.0, tokens: int = 512, depth: int = 0, hits: int = 0) -> NodeStats:
    node = NodeStats(created=now, last_access=now, tokens=tokens, depth=depth, hits=hits)
    strategy.on_insert(node)
    return node


def hit(strategy: ReuseOdds, node: NodeStats, now: float) -> None:
    node.last_access = now
    node.hits += 1
    strategy.on_hit(node)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"now": 1.0}, {"now": 2.0}),
        ({"hits": 0}, {"hits": 1}),
        ({"hits": 1}, {"hits": 4}),
        ({"tokens": 20_000}, {"tokens": 2_000}),
        ({"tokens": 1_000, "depth": 0}, {"tokens": 1_000, "depth": 30_000}),
        ({"hits": 3, "now": 0.0}, {"hits": 0, "now": 1000.0}),
    ],
)
def test_without_experience_the_prior_decides(first, second):
    strategy = new_strategy()
    assert strategy.priority(insert(strategy, **first)) < strategy.priority(insert(strategy, **second))


def test_kinds_that_are_used_again_are_kept_longer():
    strategy = new_strategy()
    documents, questions = {"tokens": 20_000}, {"tokens": 100, "depth": 3_000}
    assert strategy.priority(insert(strategy, **documents)) < strategy.priority(insert(strategy, **questions))
    for _ in range(200):
        hit(strategy, insert(strategy, **documents), now=60.0)
        strategy.on_evict(insert(strategy, **questions))
    assert strategy.priority(insert(strategy, **documents)) > strategy.priority(insert(strategy, **questions))


def test_old_experience_with_a_kind_fades():
    strategy = new_strategy(return_time_s=1.0)
    for _ in range(100_000):
        strategy.on_evict(insert(strategy))
    before = strategy.priority(insert(strategy))
    for _ in range(1_000):
        hit(strategy, insert(strategy), now=0.0)
    after = strategy.priority(insert(strategy))
    assert before < (-2.0,)
    assert after > (1.0,)


@pytest.mark.parametrize("seconds", [2.0, 30.0, 4000.0])
def test_the_return_time_is_learned_from_hits(seconds):
    strategy = new_strategy()
    for _ in range(3_000):
        hit(strategy, insert(strategy), now=seconds)
    assert strategy.return_time_s == pytest.approx(0.75 * seconds, rel=0.05)


def test_hits_of_a_shared_prompt_do_not_change_the_return_time():
    strategy = new_strategy()
    system_prompt = insert(strategy)
    hit(strategy, system_prompt, now=100.0)
    before = strategy.return_time_s
    for step in range(10_000):
        hit(strategy, system_prompt, now=100.0 + 0.01 * step)
    assert strategy.return_time_s == before


def test_a_configured_return_time_is_not_learned():
    strategy = new_strategy(return_time_s=5.0)
    for _ in range(1_000):
        hit(strategy, insert(strategy), now=900.0)
    assert strategy.return_time_s == 5.0


def test_with_return_time_zero_the_order_is_lru():
    strategy = new_strategy(return_time_s=0.0)
    often = insert(strategy, now=1.0, tokens=1, hits=50)
    assert strategy.priority(often) == (1.0, 1.0)


def test_cost_weight_keeps_deep_nodes_longer():
    deep, shallow = {"tokens": 4_000, "depth": 60_000}, {"tokens": 500, "depth": 7_500}
    orders = [
        strategy.priority(insert(strategy, **deep)) < strategy.priority(insert(strategy, **shallow))
        for strategy in (new_strategy(), new_strategy(cost_weight=1.0))
    ]
    assert orders == [True, False]


@pytest.mark.parametrize(
    "options",
    [{"return_time_s": -1.0}, {"return_time_s": float("inf")}, {"cost_weight": -0.1}, {"cost_weight": float("nan")}],
)
def test_options_that_give_no_order_are_refused(options):
    with pytest.raises(ValidationError, match=next(iter(options))):
        ReuseOddsOptions(**options)
