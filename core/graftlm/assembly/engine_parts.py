"""The parts of an assembled engine."""

from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from graftlm.assembly.adapter_loading import AdapterLoader
from graftlm.assembly.device_parts import DeviceParts
from graftlm.assembly.resolved_plugins import ResolvedPlugins
from graftlm.assembly.served_weights import NewWeights, ServedWeights
from graftlm.config import EngineConfig
from graftlm.contracts import ModelConfig
from graftlm.errors import RequestError
from graftlm.intake import Intake
from graftlm.pooling.sentence_embedding import EmbeddingDefaults
from graftlm.step_loop import StepLoop
from graftlm.tokenization import TextStream, Tokenizer
from graftlm.types import SamplingParams

__all__ = ["EngineParts"]


@dataclass(frozen=True, slots=True)
class EngineParts:
    """An assembled engine, without a thread of its own.

    Attributes:
        embedding: how the checkpoint's embeddings are made.
        weights: of the model; replaced and read through this.
        device_parts: what steps run on, for tools that run their own steps while the loop runs none.
        adapters: loads and unloads adapters; None if the configuration takes none.
        resolved: the provider of each family, and why it was chosen.
    """

    config: EngineConfig
    model_config: ModelConfig
    tokenizer: Tokenizer
    intake: Intake
    loop: StepLoop
    device: str
    dtype: str
    embedding: EmbeddingDefaults
    weights: ServedWeights
    device_parts: DeviceParts
    adapters: AdapterLoader | None = None
    resolved: ResolvedPlugins = field(default_factory=dict)

    def summary(self) -> dict[str, Any]:
        """Return what other processes need of this engine, as plain data; `limits` has the fields of IntakeLimits."""
        limits = asdict(self.intake.limits) | {"logits_processors": sorted(self.intake.limits.logits_processors)}
        kv = self.loop.scheduler.kv
        loaded = {} if self.adapters is None else self.adapters.loaded
        return {
            "limits": limits,
            "architectures": self.model_config.architectures,
            "device": self.device,
            "dtype": self.dtype,
            "kv_dtype": str(self.device_parts.kv.dtype).removeprefix("torch."),
            "page_size": kv.page_size,
            "num_pages": kv.pool.num_pages,
            "adapters": {name: it.digest for name, it in loaded.items()},
            "resolved": self.resolved,
        }

    def replace_weights(self, new: NewWeights, *, flush_cache: bool) -> None:
        """Replace the model's weights between two steps.

        Args:
            new: checked by `weights`.
            flush_cache: drop all keys and values, which the old weights computed; running and paused requests are
                computed again. False keeps them in use.

        Raises:
            RequestError: flush_cache is False and the cache has tiers below the device's memory, whose content is keyed
                by the weights.
            EngineError: copying failed halfway.
        """
        if not flush_cache and self.loop.scheduler.kv.tiers is not None:
            raise RequestError("flush_cache must be true: the cache's tiers would keep what the old weights made")
        self.loop.change_model(lambda: self.weights.replace(new), keep_memory=not flush_cache)

    def read_weight(self, name: str) -> torch.Tensor:
        """Return a copy of a weight on the CPU, made between two steps. Raises what `ServedWeights.read` raises."""
        found: list[torch.Tensor] = []
        self.loop.run_on_device(lambda: found.append(self.weights.read(name)))
        return found[0]

    def text_stream(self, params: SamplingParams) -> TextStream:
        """Return a new detokeniser for one completion."""
        return TextStream(self.tokenizer, params)
