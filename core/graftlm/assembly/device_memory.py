"""Reads the size of a device's memory, and checks that parts of an engine fit into it."""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil
import torch

from graftlm.errors import ConfigError

__all__ = ["DeviceMemory", "check_room", "gib"]

_logger = logging.getLogger(__name__)

_ROOT: Final = Path("/")


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """The memory of a device, read after the weights are loaded.

    Attributes:
        total_bytes: size of the device's memory.
        free_bytes: number of bytes that no program uses.
        weight_bytes: number of bytes that this process has allocated for weights; None on a CPU, where allocations are
            not counted.
    """

    total_bytes: int
    free_bytes: int
    weight_bytes: int | None

    @classmethod
    def read(cls, device: torch.device, root: Path = _ROOT) -> "DeviceMemory":
        """Read the memory of a device. For the CPU, the limits of the process's cgroups are applied.

        Args:
            root: root folder of the file system in which the cgroups are mounted.
        """
        if device.type == "cpu":
            host = psutil.virtual_memory()
            total_bytes, free_bytes = host.total, host.available
            for limit_bytes, used_bytes in _cgroups(root):
                total_bytes = min(total_bytes, limit_bytes)
                free_bytes = min(free_bytes, max(0, limit_bytes - used_bytes))
            return cls(total_bytes, free_bytes, None)
        torch.cuda.empty_cache()  # memory in PyTorch's cache is free too
        free_bytes, total_bytes = torch.cuda.mem_get_info(device)
        return cls(total_bytes, free_bytes, torch.cuda.memory_allocated(device))

    def shared_by(self, num_replicas: int) -> "DeviceMemory":
        """Return one replica's share of the memory, if `num_replicas` replicas share the device."""
        return DeviceMemory(self.total_bytes // num_replicas, self.free_bytes // num_replicas, self.weight_bytes)


def check_room(num_bytes: int, device_memory: DeviceMemory, setting: str, what: str, largest: str) -> None:
    """Check that an allocation fits into a device's memory. If it does not fit into the free memory, log a warning.

    Args:
        num_bytes: size of the allocation.
        setting: name of the setting to lower, for messages: "memory.kv_tokens" or "engine.yaml:3: memory.kv_tokens".
        what: description of the content, such as "280,000 tokens".
        largest: the largest value of the setting that fits into the free memory.

    Raises:
        ConfigError: the allocation is larger than the device's memory.
    """
    if num_bytes <= device_memory.free_bytes:
        return
    reason = (
        f"{setting}: {what} need {gib(num_bytes)}, but the memory has {gib(device_memory.total_bytes)}, of which "
        f"{gib(device_memory.free_bytes)} are free. The largest value that fits is {largest}"
    )
    if num_bytes > device_memory.total_bytes:
        raise ConfigError(reason)
    _logger.warning("%s", reason)


def gib(num_bytes: int) -> str:
    """Return a number of bytes as text in GiB."""
    return f"{num_bytes / (1 << 30):.2f} GiB" if num_bytes < 1 << 80 else f"over {1 << 50:,} GiB"


def _cgroups(root: Path) -> list[tuple[int, int]]:
    """Return (limit in bytes, used bytes) for each cgroup of this process that has a limit.

    The used bytes do not include the page cache, because the kernel can drop it. The kernel has two lists of its pages,
    "active" and "inactive"; for instance, pages of weights that were read twice are on the active list.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        _, _, entry = line.partition(":")
        controllers, colon, path = entry.partition(":")
        if not colon:  # the line does not have the kernel's format
            continue
        if controllers == "":
            top, limit, used, prefix = root / "sys/fs/cgroup", "memory.max", "memory.current", ""
        elif "memory" in controllers.split(","):
            top = root / "sys/fs/cgroup/memory"
            limit, used, prefix = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"
        else:
            continue
        folder = top / path.lstrip("/")
        # In a container, the path may be a host path that is not mounted. Only `top` then has files.
        for group in [folder, *folder.parents]:
            if group.is_relative_to(top) and (limit_bytes := _number(group / limit)) is not None:
                statistics = _statistics(group / "memory.stat")
                cached_bytes = sum(statistics.get(f"{prefix}{name}", 0) for name in ("active_file", "inactive_file"))
                used_bytes = (_number(group / used) or 0) - cached_bytes
                found.append((limit_bytes, max(0, used_bytes)))
    return found


def _number(file: Path) -> int | None:
    try:
        return int(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # there is no such file, or it contains "max"
        return None


def _statistics(file: Path) -> dict[str, int]:
    """Return name -> bytes from a memory.stat file. Lines of another format are ignored."""
    try:
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return {}
    pairs = [line.split() for line in lines]
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdecimal()}
