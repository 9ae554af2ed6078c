"""A graftlm plugin: the media processor `new-plugin`."""

from graftlm import Provider, hookimpl
from graftlm.contracts import MediaCapabilities, MediaContext, MediaProcessor, NoOptions

from graftlm_new_plugin.media import Tiles

__all__ = ["provide_media"]


def _create(options: NoOptions, context: MediaContext) -> MediaProcessor:
    return Tiles(context)


@hookimpl
def provide_media() -> list[Provider[MediaProcessor]]:
    """Offer `new-plugin`."""
    return [
        Provider(
            name="new-plugin",
            summary="Pictures as the mean colours of their tiles",
            api_version=1,
            create=_create,
            capabilities=MediaCapabilities(architectures=("graftlm_new_plugin",)),
        )
    ]
