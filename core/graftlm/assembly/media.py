"""Creates the parts that serve pictures: the media processor, the tower, and the memory for features."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from graftlm.assembly.plugin_choices import ChosenPlugins
from graftlm.assembly.target import Target
from graftlm.checkpoint import iter_weights, tower_weights
from graftlm.config import EngineConfig
from graftlm.contracts import MediaContext, MediaProcessor, ModelConfig, Provider
from graftlm.errors import ConfigError, UnsupportedArchitectureError
from graftlm.execution.media_features import MediaFeatures
from graftlm.media import MediaLimits, MediaPrompts
from graftlm.memory import FeaturePool
from graftlm.registry import AUTO, Registry
from graftlm.scheduling.media_feeding import MediaFeeding
from graftlm.tokenization import Tokenizer

__all__ = ["MediaParts", "make_media", "make_media_processor", "make_media_prompts"]


@dataclass(frozen=True, slots=True)
class MediaParts:
    """The parts of an engine that serve pictures.

    Attributes:
        provider: the provider of the processor.
        processor: prepares pictures.
        features: computes and stores features on the device.
        feeding: decides when features are computed and deleted.
        max_features: capacity of the memory for features, in rows.
    """

    provider: Provider[MediaProcessor]
    processor: MediaProcessor
    features: MediaFeatures
    feeding: MediaFeeding
    max_features: int


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


def make_media(
    config: EngineConfig, registry: Registry, target: Target, chosen: ChosenPlugins, on_stage: Callable[[str], None]
) -> MediaParts | None:
    """Load the tower of a checkpoint; None for a checkpoint without one.

    Raises:
        UnsupportedArchitectureError: the text model cannot use features.
        GraftlmError: the processor or the tower cannot be loaded.
    """
    found = make_media_processor(config, registry, target.path, target.model_config)
    if found is None:
        return None
    provider, processor = found
    if not chosen.model.takes_features:
        raise UnsupportedArchitectureError(
            f"{type(chosen.model).__name__}, the text model of this checkpoint, cannot use features of pictures"
        )
    on_stage("loading the tower for pictures")
    weights = tower_weights(iter_weights(target.path, target.dtype))
    tower = processor.load_tower(weights, target.device, target.dtype)
    row_bytes = tower.width * torch.empty((), dtype=target.dtype).element_size()
    max_features = config.media.feature_bytes // row_bytes
    if not max_features:
        raise ConfigError(
            f"media.feature_bytes is {config.media.feature_bytes}, but a row of features has {row_bytes} bytes"
        )
    features = MediaFeatures(tower, target.device)
    return MediaParts(provider, processor, features, MediaFeeding(FeaturePool(max_features)), max_features)
