"""A graftlm plugin: the prefix cache `new-plugin`."""

from graftlm import Provider, hookimpl
from graftlm.contracts import CacheCapabilities, CacheContext, PrefixCache

from graftlm_new_plugin.page_trie import PageTrie, PageTrieOptions

__all__ = ["provide_prefix_caches"]


def _create(options: PageTrieOptions, context: CacheContext) -> PrefixCache:
    return PageTrie(options, context)


@hookimpl
def provide_prefix_caches() -> list[Provider[PrefixCache]]:
    """Offer `new-plugin`."""
    return [
        Provider(
            name="new-plugin",
            summary="A trie with one node for each page",
            api_version=1,
            create=_create,
            options=PageTrieOptions,
            capabilities=CacheCapabilities(),
            rank=-10,  # low, so that `auto` prefers the built-in caches
        )
    ]
