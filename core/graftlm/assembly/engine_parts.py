"""The parts of an assembled engine."""

from collections.abc import Collection
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from graftlm.assembly.adapter_loading import AdapterLoader
from graftlm.assembly.device_parts import DeviceParts
from graftlm.assembly.media import MediaParts
from graftlm.assembly.media_processor import make_media_prompts
from graftlm.assembly.rank_controls import RankKV, RankWeights
from graftlm.assembly.resolved_plugins import ResolvedPlugins
from graftlm.assembly.served_weights import NewWeights, ServedWeights
from graftlm.config import EngineConfig
from graftlm.contracts import ModelConfig
from graftlm.errors import RequestError, UnsupportedFeatureError
from graftlm.execution.kv_store import KVStore
from graftlm.execution.released_tensors import return_free_memory
from graftlm.intake import Intake
from graftlm.media import MediaPrompts
from graftlm.pooling.sentence_embedding import EmbeddingDefaults
from graftlm.step_loop import StepLoop
from graftlm.tokenization import TextStream, Tokenizer
from graftlm.types import SamplingParams

__all__ = ["EngineParts"]


@dataclass(frozen=True, slots=True)
class EngineParts:
    """The parts of an assembled engine, without a thread that runs its step loop.

    Attributes:
        config: the configuration.
        model_config: the checkpoint's configuration.
        tokenizer: the checkpoint's tokenizer.
        intake: checks requests.
        loop: the step loop.
        device: device type, "cpu" or "cuda".
        dtype: name of the dtype in which the model computes.
        embedding: the checkpoint's settings for embeddings.
        weights: replaces and reads the model's weights.
        kv: the memory of keys and values.
        loaded_parts: the parts that compute steps; None if they are in other processes.
        adapters: loads and unloads adapters; None if the configuration does not enable adapters.
        resolved: the chosen provider of each family, and the reason.
        media: the parts that serve pictures; None if the checkpoint has no tower.
    """

    config: EngineConfig
    model_config: ModelConfig
    tokenizer: Tokenizer
    intake: Intake
    loop: StepLoop
    device: str
    dtype: str
    embedding: EmbeddingDefaults
    weights: ServedWeights | RankWeights
    kv: KVStore | RankKV
    loaded_parts: DeviceParts | None
    adapters: AdapterLoader | None = None
    resolved: ResolvedPlugins = field(default_factory=dict)
    media: MediaParts | None = None

    @property
    def device_parts(self) -> DeviceParts:
        """The parts that compute steps, for tools that run steps while the loop is idle.

        Raises:
            UnsupportedFeatureError: the ranks are other processes.
        """
        if self.loaded_parts is None:
            raise UnsupportedFeatureError("this engine's ranks are other processes, which only run plans")
        return self.loaded_parts

    def summary(self) -> dict[str, Any]:
        """Return information about the engine for other processes, as plain data.

        `limits` has the fields of `IntakeLimits`.
        """
        limits = asdict(self.intake.limits) | {"logits_processors": sorted(self.intake.limits.logits_processors)}
        kv = self.loop.scheduler.kv
        loaded = {} if self.adapters is None else self.adapters.loaded
        return {
            "limits": limits,
            "architectures": self.model_config.architectures,
            "device": self.device,
            "dtype": self.dtype,
            "kv_dtype": str(self.kv.dtype).removeprefix("torch."),
            "page_size": kv.page_size,
            "num_pages": kv.pool.num_pages,
            "adapters": {name: it.digest for name, it in loaded.items()},
            "resolved": self.resolved,
            "max_features": None if self.media is None else self.media.max_features,
        }

    def replace_weights(self, new: NewWeights, *, flush_cache: bool) -> None:
        """Replace the model's weights between two steps.

        Args:
            new: the new weights, which `weights` has checked.
            flush_cache: whether all keys and values, which the old weights computed, are discarded. The tokens of
                running and paused requests are then computed again.

        Raises:
            RequestError: flush_cache is False, but the cache has lower tiers: the names of their blocks depend on the
                weights. Or the memory of the weights is released.
            EngineError: copying failed halfway.
        """
        if self.kv.is_released:
            self.loop.change_model(lambda: self.weights.replace(new), keep_memory=True)
            return
        if not flush_cache and self.loop.scheduler.kv.tiers is not None:
            raise RequestError(
                "flush_cache must be true: otherwise the cache's lower tiers would keep blocks of the old weights"
            )
        self.loop.change_model(lambda: self.weights.replace(new), keep_memory=not flush_cache)

    @property
    def can_run(self) -> bool:
        """Whether steps can run: no memory is released, and no weights are missing."""
        return not self.kv.is_released and not self.weights.is_released and self.weights.lacking is None

    def release_memory(self, tags: Collection[str], *, keep_weights: bool) -> None:
        """Release memory until `resume_memory`. Call `loop.settle` first, and no step in the meantime.

        Memory that is already released stays so. Running requests are put back into the queue.

        Args:
            tags: "kv_cache": keys and values, with the prefix cache's host memory; "weights": the model's parameters.
            keep_weights: whether `resume_memory` restores the weights; False: they are dropped, also if they are
                released already.

        Raises:
            GraftlmError: the weights cannot be released; nothing is released.
        """
        if "weights" in tags:
            if keep_weights:
                self.weights.check_release()
            self.loop.run_on_device(lambda: self.weights.release(keep=keep_weights))
        kv = self.kv
        if "kv_cache" in tags and not kv.is_released:
            self.weights.graphs.hold()
            self.loop.release_memory(kv.release)
        self.loop.run_on_device(return_free_memory)

    def resume_memory(self, tags: Collection[str]) -> None:
        """Allocate released memory again, restore the weights, and create the prefix cache, which is empty.

        Args:
            tags: as for `release_memory`.

        Raises:
            RuntimeError: the device has too little free memory. This method may be called again.
            Exception: any error of the cache's provider. This method may be called again.
        """
        kv, graphs = self.kv, self.weights.graphs
        if "weights" in tags:
            self.loop.run_on_device(self.weights.resume)
        if "kv_cache" not in tags or not kv.is_released:
            return
        changed: list[bool] = []
        self.loop.resume_memory()
        self.loop.run_on_device(lambda: changed.append(kv.restore()))
        if any(changed):
            graphs.recapture()
        self.loop.run_on_device(graphs.unhold)

    def read_weight(self, name: str) -> torch.Tensor:
        """Return a copy of a weight on the CPU, read between two steps. Raises: see `ServedWeights.read`."""
        found: list[torch.Tensor] = []
        self.loop.run_on_device(lambda: found.append(self.weights.read(name)))
        return found[0]

    def local_media_prompts(self) -> MediaPrompts | None:
        """Return the object that tokenizes prompts with pictures of this process's programs; None without a tower."""
        if self.media is None:
            return None
        media = self.media
        return make_media_prompts(self.config, media.processor, self.tokenizer, media.max_features, is_local=True)

    def text_stream(self, params: SamplingParams) -> TextStream:
        """Return a new detokenizer for one completion."""
        return TextStream(self.tokenizer, params)
