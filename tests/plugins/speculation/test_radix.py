import numpy as np
import pytest

from graftlm.contracts import Drafter, DrafterContext, DraftRequest, PrefixKey
from graftlm.testing import CacheRig, NaiveCache
from graftlm.testing.drafter import DrafterConformance
from graftlm_cache.radix import RadixCache
from graftlm_speculation.radix import RadixDrafter

PAGE_SIZES = pytest.mark.parametrize("page_size", [1, 4, 16])


class TestRadixDrafter(DrafterConformance):
    def create(self, context: DrafterContext) -> Drafter:
        return RadixDrafter(context.continuation)


class Bench:
    """The drafter over a real cache, in which finished requests leave their whole pages."""

    def __init__(self, page_size: int = 1, cache_class=RadixCache) -> None:
        self.rig = CacheRig(cache_class, page_size)
        self.drafter = RadixDrafter(self.rig.cache.continuation)

    def finish(self, tokens, namespace: str = "") -> None:
        self.rig.insert(PrefixKey(np.array(tokens, dtype=np.int32), namespace))

    def draft(self, tokens, limit: int = 8, namespace: str = "") -> list[int]:
        """Return the drafted tokens; none without a draft."""
        request = DraftRequest(0, namespace, np.array(tokens, dtype=np.int32), limit)
        (draft,) = self.drafter.propose([request])
        return [] if draft is None else draft.token_ids.tolist()


@PAGE_SIZES
def test_a_regenerated_answer_is_drafted_at_each_of_its_tokens(page_size):
    bench = Bench(page_size)
    text = list(range(100, 164))
    bench.finish(text)
    for num_known in range(1, 64):
        assert bench.draft(text[:num_known], limit=5) == text[num_known : num_known + 5]
    assert bench.draft(text) == []


@PAGE_SIZES
def test_only_whole_cached_pages_are_drafted(page_size):
    bench = Bench(page_size)
    text = list(range(page_size * 3 + page_size - 1))
    bench.finish(text)
    assert bench.draft(text[:2], limit=1000) == text[2 : page_size * 3]


@PAGE_SIZES
def test_another_text_is_not_drafted_for(page_size):
    bench = Bench(page_size)
    text = list(range(48))
    bench.finish(text)
    assert bench.draft([*text[:20], 999]) == []
    assert bench.draft([999, *text[:20]]) == []
    assert bench.draft([*text, 999]) == []


@PAGE_SIZES
def test_namespaces_are_separate(page_size):
    bench = Bench(page_size)
    text = list(range(32))
    bench.finish(text, namespace="a")
    assert bench.draft(text[:9], namespace="b") == []
    assert bench.draft(text[:9]) == []
    assert bench.draft(text[:9], namespace="a") == text[9:17]


@PAGE_SIZES
@pytest.mark.parametrize("num_known", [16, 19])
def test_the_most_recently_used_branch_is_drafted(page_size, num_known):
    bench = Bench(page_size)
    trunk = list(range(19))
    branches = {name: [*trunk, *[name] * 29] for name in (70, 80, 90)}
    for text in branches.values():
        bench.finish(text)
    for name in (90, 70, 80, 90):
        bench.rig.cache.match(PrefixKey(np.array(branches[name], dtype=np.int32)))
        assert bench.draft(trunk[:num_known], limit=29) == branches[name][num_known : num_known + 29]


@PAGE_SIZES
def test_a_draft_goes_on_past_the_place_where_others_branch_off(page_size):
    bench = Bench(page_size)
    long, other = list(range(64)), [*range(32), *range(500, 532)]
    bench.finish(other)
    bench.finish(long)
    assert bench.draft(long[:5], limit=50) == long[5:55]


@PAGE_SIZES
def test_evicted_content_gives_no_drafts(page_size):
    bench = Bench(page_size)
    text = list(range(32))
    bench.finish(text)
    bench.rig.cache.evict(1000)
    assert bench.draft(text[:9]) == []


def test_a_recent_branch_among_very_many_is_drafted():
    bench = Bench(page_size=4)
    for last in range(1000):
        bench.finish([1, 2, 3, last, 5, 6, 7, 8])
    assert bench.draft([1, 2, 3]) == [999, 5, 6, 7, 8]


def test_a_cache_without_continuations_gives_no_drafts():
    bench = Bench(cache_class=NaiveCache)
    bench.finish(range(32))
    assert bench.draft(range(9)) == []
