"""Creates the media processor of a checkpoint, and tokenizes prompts with it; needs no torch."""

from pathlib import Path

from graftlm.config import EngineConfig
from graftlm.contracts import MediaContext, MediaProcessor, ModelConfig, Provider
from graftlm.errors import UnsupportedArchitectureError
from graftlm.media import MediaLimits, MediaPrompts
from graftlm.registry import AUTO, Registry
from graftlm.tokenization import Tokenizer

__all__ = ["make_media_processor", "make_media_prompts"]


def make_media_processor(
    config: EngineConfig, registry: Registry, path: Path, model_config: ModelConfig
) -> tuple[Provider[MediaProcessor], MediaProcessor] | None:
    """Create the media processor of a checkpoint; None for a checkpoint without a tower.

    Raises:
        UnsupportedArchitectureError: no media provider supports the checkpoint.
        GraftlmError: the processor cannot be created.
    """
    if model_config.media is None:
        return None
    architectures = tuple(map(str, model_config.media.get("architectures") or ()))
    name = config.media.name
    provider: Provider[MediaProcessor]
    if name != AUTO:
        provider = registry.provider("media", name)
    else:
        claimed = registry.available("media")
        fitting = [one for one in claimed if not set(architectures).isdisjoint(one.capabilities.architectures)]
        if not fitting:
            known = sorted({one for provider in claimed for one in provider.capabilities.architectures})
            raise UnsupportedArchitectureError(
                f"{path} has a text_config, as multimodal models have, but no media processor supports "
                f"{' or '.join(architectures)}. Supported: {', '.join(known) or 'none'}."
            )
        provider = fitting[0]
    context = MediaContext(model_config, path, path if config.model.trust_remote_code else None)
    processor: MediaProcessor = registry.create("media", provider, config.media.options, context, config.origins)
    return provider, processor


def make_media_prompts(
    config: EngineConfig, processor: MediaProcessor, tokenizer: Tokenizer, max_features: int, *, is_local: bool
) -> MediaPrompts:
    """Create the object that tokenizes prompts with pictures.

    Args:
        max_features: maximum number of feature tokens of one picture.
        is_local: whether the prompts come from a program in this process.
    """
    media = config.media
    limits = MediaLimits(
        max_items=media.max_items,
        max_bytes=media.max_bytes,
        max_pixels=media.max_pixels,
        allowed_hosts=media.allowed_hosts,
        download_timeout_s=media.download_timeout_s,
    )
    return MediaPrompts(
        processor, tokenizer, limits, media.prepared_bytes, is_local=is_local, max_features=max_features
    )
