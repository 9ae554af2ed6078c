"""A graftlm plugin: the drafter `new-plugin`."""

from graftlm import Provider, hookimpl
from graftlm.contracts import Drafter, DrafterContext

from graftlm_new_plugin.drafter import Followers, FollowersOptions

__all__ = ["provide_drafters"]


def _create(options: FollowersOptions, context: DrafterContext) -> Drafter:
    return Followers(options)


@hookimpl
def provide_drafters() -> list[Provider[Drafter]]:
    """Offer `new-plugin`."""
    return [
        Provider(
            name="new-plugin",
            summary="Drafts the token that last followed the latest tokens, one token after another",
            api_version=1,
            create=_create,
            options=FollowersOptions,
        )
    ]
