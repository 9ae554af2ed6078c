"""Runs graftlm's conformance kit on `new-plugin`, and tests the plugin's own behaviour."""

from graftlm.testing import CacheRig, PrefixCacheConformance

from graftlm_new_plugin import provide_prefix_caches


def create(context, **options):
    (provider,) = provide_prefix_caches()
    return provider.create(provider.options(**options), context)


class TestContract(PrefixCacheConformance):
    def create(self, context):
        return create(context)


def test_a_prompt_is_kept_up_to_its_limit():
    rig = CacheRig(lambda context: create(context, max_prefix_pages=2), page_size=4)
    result = rig.insert(rig.key(1, 2, 3))
    assert (result.existing_pages, result.cached_pages) == (0, 2)
    assert rig.cache.probe(rig.key(1, 2, 3)) == 2
