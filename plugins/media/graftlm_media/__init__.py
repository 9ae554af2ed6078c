"""The built-in media providers: pictures for models whose processor and tower are part of Transformers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from graftlm import Provider, hookimpl
from graftlm.contracts import MediaCapabilities

if TYPE_CHECKING:
    from graftlm.contracts import MediaContext, MediaProcessor, NoOptions

__all__ = ["ARCHITECTURES", "QWEN_ARCHITECTURES", "provide_media"]

#: Class names in config.json of the supported checkpoints.
ARCHITECTURES = (
    "Idefics3ForConditionalGeneration",
    "LlavaForConditionalGeneration",
    "LlavaNextForConditionalGeneration",
    "SmolVLMForConditionalGeneration",
)


QWEN_ARCHITECTURES = ("Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration")


def _create_transformers(options: NoOptions, context: MediaContext) -> MediaProcessor:
    from graftlm_media.processor import TransformersMedia

    return TransformersMedia(context)


def _create_qwen(options: NoOptions, context: MediaContext) -> MediaProcessor:
    from graftlm_media.qwen import QwenMedia

    return QwenMedia(context)


@hookimpl
def provide_media() -> list[Provider[MediaProcessor]]:
    """Return the providers for checkpoints of Transformers."""
    return [
        Provider(
            name="transformers",
            summary="LLaVA 1.5 and NeXT, SmolVLM and Idefics 3, with Transformers' processors and towers",
            api_version=1,
            create=_create_transformers,
            capabilities=MediaCapabilities(architectures=ARCHITECTURES),
        ),
        Provider(
            name="qwen_vl",
            summary="Qwen2-VL and Qwen2.5-VL, with Transformers' image processors and towers",
            api_version=1,
            create=_create_qwen,
            capabilities=MediaCapabilities(architectures=QWEN_ARCHITECTURES),
        ),
    ]
