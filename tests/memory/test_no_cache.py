"""The cache that holds nothing keeps the contract of prefix caches."""

from graftlm.contracts import CacheContext, PrefixCache
from graftlm.memory.no_cache import NoCache
from graftlm.testing import PrefixCacheConformance


class TestNoCache(PrefixCacheConformance):
    reuses = False
    max_examples = 5

    def create(self, context: CacheContext) -> PrefixCache:
        return NoCache()
