"""The device tier of the hierarchical cache keeps the contract of prefix caches."""

from graftlm.testing import PrefixCacheConformance
from graftlm_cache.hicache.create import create_hicache
from graftlm_cache.hicache.options import HicacheOptions


class TestHierarchicalCache(PrefixCacheConformance):
    def create(self, context):
        return create_hicache(HicacheOptions(), context)
