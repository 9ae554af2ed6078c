"""The built-in media provider: pictures for models whose processor and tower are part of Transformers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from graftlm import Provider, hookimpl
from graftlm.contracts import MediaCapabilities

if TYPE_CHECKING:
    from graftlm.contracts import MediaContext, MediaProcessor, NoOptions

__all__ = ["ARCHITECTURES", "provide_media"]

#: Class names in config.json of the supported checkpoints.
ARCHITECTURES = (
    "Idefics3ForConditionalGeneration",
    "LlavaForConditionalGeneration",
    "SmolVLMForConditionalGeneration",
)


def _create_transformers(options: NoOptions, context: MediaContext) -> MediaProcessor:
    from graftlm_media.processor import TransformersMedia

    return TransformersMedia(context)


@hookimpl
def provide_media() -> list[Provider[MediaProcessor]]:
    """Return the provider for checkpoints of Transformers."""
    return [
        Provider(
            name="transformers",
            summary="LLaVA 1.5, SmolVLM and Idefics 3, with Transformers' processors and towers",
            api_version=1,
            create=_create_transformers,
            capabilities=MediaCapabilities(architectures=ARCHITECTURES),
        )
    ]
