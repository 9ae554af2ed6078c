"""The parts that an ablation can switch off, and the conditions under which switching them off has an effect."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch

from graftlm.assembly.target import detect_platform
from graftlm.bench.offline import Workload
from graftlm.checkpoint import load_model_config, resolve_checkpoint, torch_dtype
from graftlm.config import EngineConfig
from graftlm.errors import ProviderUnavailableError
from graftlm.layers.kernel_build import user_cache_dir
from graftlm.layers.ops import fused_ops
from graftlm.layers.packing import can_pack

__all__ = ["SWITCHES", "Switch"]


def _always(config: EngineConfig) -> str | None:
    return None


def _any_workload(workload: Workload) -> str | None:
    return None


@dataclass(frozen=True, slots=True)
class Switch:
    """One part of an engine that can be switched off.

    Attributes:
        off: settings that switch the part off: section -> field -> value.
        unavailable: function that returns the reason why a configuration cannot have the part on this machine, or None.
        unused_by: function that returns the reason why a workload does not use the part, or None.
    """

    off: Mapping[str, Mapping[str, Any]]
    unavailable: Callable[[EngineConfig], str | None] = _always
    unused_by: Callable[[Workload], str | None] = _any_workload

    def switched_off(self, config: EngineConfig) -> EngineConfig:
        """Return a copy of a configuration in which the part is switched off."""
        sections = config.model_dump()
        for section, fields in self.off.items():
            sections[section].update(fields)
        return EngineConfig.load(sections)

    def not_applicable(self, config: EngineConfig) -> str | None:
        """Return why the switch has no effect for a configuration on this machine; None if it has an effect."""
        reason = self.unavailable(config)
        if reason is None and self.switched_off(config).model_dump() == config.model_dump():
            return "it is already off in this configuration"
        return reason


def _cannot_pack(config: EngineConfig) -> str | None:
    device = detect_platform(config).device
    if device != "cpu":
        return f"weights are packed on CPUs only, but the device is {device}"
    dtype = torch_dtype(config.model.dtype, load_model_config(resolve_checkpoint(config.model.path)))
    return None if can_pack(dtype) else f"this CPU has no kernels for packed {str(dtype).removeprefix('torch.')}"


def _cannot_fuse(config: EngineConfig) -> str | None:
    dtype = torch_dtype(config.model.dtype, load_model_config(resolve_checkpoint(config.model.path)))
    try:
        fused_ops(torch.device(detect_platform(config).device), dtype, user_cache_dir(os.environ))
    except ProviderUnavailableError as error:
        return str(error)
    return None


def _cannot_replay(config: EngineConfig) -> str | None:
    can_replay = detect_platform(config).device == "cuda" or config.execution.graphs == "auto"
    return None if can_replay else "on a CPU, steps are replayed only if execution.graphs is auto"


def _without_grammar(workload: Workload) -> str | None:
    return None if workload.has_grammar else "no request has a grammar"


SWITCHES: Final = {
    "prefix_cache": Switch({"cache": {"name": "chunk", "options": {}}}),
    "overlap": Switch({"scheduling": {"overlap": False}}),
    "prepacking": Switch({"model": {"prepack": False}}, _cannot_pack),
    "fused_ops": Switch({"model": {"native_ops": False}}, _cannot_fuse),
    "chunk_mixing": Switch({"scheduling": {"mix_chunks": False}}),
    "jump_forward": Switch({"grammar": {"jump_forward": False}}, unused_by=_without_grammar),
    "graphs": Switch({"execution": {"graphs": False}}, _cannot_replay),
}
