"""Creates the parts that serve pictures on the device: the tower, and the memory for features."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from graftlm.assembly.media_processor import make_media_processor
from graftlm.assembly.plugin_choices import ChosenPlugins
from graftlm.assembly.target import Target
from graftlm.checkpoint import iter_weights, tower_weights
from graftlm.config import EngineConfig
from graftlm.contracts import MediaProcessor, Provider
from graftlm.errors import ConfigError, UnsupportedArchitectureError
from graftlm.execution.media_features import MediaFeatures
from graftlm.memory import FeaturePool
from graftlm.registry import Registry
from graftlm.scheduling.media_feeding import MediaFeeding

__all__ = ["MediaParts", "make_media"]


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
