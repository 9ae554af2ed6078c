"""The device tier of the hierarchical cache keeps the contract of prefix caches."""

import pytest

from graftlm.testing import PrefixCacheConformance
from graftlm_cache.hicache.create import create_hicache
from graftlm_cache.hicache.options import HicacheOptions


@pytest.mark.few(page_size=2)
class TestHierarchicalCache(PrefixCacheConformance):
    def create(self, context):
        return create_hicache(HicacheOptions(), context)
