"""The checkpoint, the device and the dtype for which an engine is assembled."""

from dataclasses import dataclass
from pathlib import Path

import torch

from graftlm.checkpoint import torch_dtype
from graftlm.config import EngineConfig
from graftlm.contracts import ONE_RANK, ModelConfig, ModelContext, ParallelContext, Platform
from graftlm.errors import ConfigError

__all__ = ["Target", "context_len_of", "detect_platform"]


@dataclass(frozen=True, slots=True)
class Target:
    """The properties of an engine that all stages of its assembly use.

    Attributes:
        path: path of the checkpoint.
        model_config: the checkpoint's configuration.
        platform: kind of the device, with its compute capability.
        device: device of all tensors.
        dtype: dtype in which the model computes.
        context_len: maximum number of tokens of a request.
        num_replicas: number of engines that share this machine's memory, including this one.
        code_folder: folder from which the model may import code; None unless `model.trust_remote_code` is set.
        parallel: the place of this process among the ranks of its replica.
    """

    path: Path
    model_config: ModelConfig
    platform: Platform
    device: torch.device
    dtype: torch.dtype
    context_len: int
    num_replicas: int
    code_folder: Path | None
    parallel: ParallelContext = ONE_RANK

    @classmethod
    def of(
        cls,
        config: EngineConfig,
        platform: Platform,
        path: Path,
        model_config: ModelConfig,
        num_replicas: int,
        parallel: ParallelContext = ONE_RANK,
    ) -> "Target":
        """Return the target of a configuration.

        Raises:
            ConfigError: the configured dtype or context length does not fit the checkpoint.
        """
        return cls(
            path=path,
            model_config=model_config,
            platform=platform,
            device=torch.device(platform.device),
            dtype=torch_dtype(config.model.dtype, model_config),
            context_len=context_len_of(config, model_config),
            num_replicas=num_replicas,
            code_folder=path if config.model.trust_remote_code else None,
            parallel=parallel,
        )

    @property
    def dtype_name(self) -> str:
        """The name of the dtype, such as "bfloat16"."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def num_sharing(self) -> int:
        """Number of ranks that share the device's memory: those of all replicas on a CPU; 1 on GPUs, which have one."""
        return self.num_replicas * self.parallel.size if self.device.type == "cpu" else 1

    @property
    def model_context(self) -> ModelContext:
        """The context for the creation of the model."""
        return ModelContext(
            self.model_config, self.device, self.dtype, self.context_len, self.code_folder, self.parallel
        )


def detect_platform(config: EngineConfig) -> Platform:
    """Return the configured device with its compute capability.

    Raises:
        ConfigError: a CUDA device is configured, but there is none.
    """
    device = config.model.device
    if device == "cpu" or (device == "auto" and not torch.cuda.is_available()):
        return Platform("cpu")
    if not torch.cuda.is_available():
        raise ConfigError("model.device is 'cuda', but torch finds no CUDA device. Set model.device: auto.")
    return Platform("cuda", torch.cuda.get_device_capability())


def context_len_of(config: EngineConfig, model_config: ModelConfig) -> int:
    """Return the context length: the maximum number of tokens of a request.

    Raises:
        ConfigError: the configured length exceeds the checkpoint's context length.
    """
    configured, longest = config.model.context_len, model_config.max_position_embeddings
    if configured is not None and configured > longest:
        raise ConfigError(f"model.context_len is {configured}, but this checkpoint's context has only {longest} tokens")
    return longest if configured is None else configured
