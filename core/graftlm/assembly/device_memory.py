"""How much memory a device has, for one of the replicas that share it."""

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
    """A device's memory once the weights are loaded.

    Attributes:
        total_bytes, free_bytes: of the device, whoever has the rest.
        weight_bytes: what the model has of it; None where nobody counts.
    """

    total_bytes: int
    free_bytes: int
    weight_bytes: int | None

    @classmethod
    def read(cls, device: torch.device, root: Path = _ROOT) -> "DeviceMemory":
        """Ask the device, or the operating system for the host, where the limits of the process's cgroups count.

        Args:
            root: of the file system in which the cgroups are mounted.
        """
        if device.type == "cpu":
            host = psutil.virtual_memory()
            total_bytes, free_bytes = host.total, host.available
            for limit_bytes, used_bytes in _cgroups(root):
                total_bytes = min(total_bytes, limit_bytes)
                free_bytes = min(free_bytes, max(0, limit_bytes - used_bytes))
            return cls(total_bytes, free_bytes, None)
        torch.cuda.empty_cache()  # what PyTorch keeps of memory that nobody uses is free, too
        free_bytes, total_bytes = torch.cuda.mem_get_info(device)
        return cls(total_bytes, free_bytes, torch.cuda.memory_allocated(device))

    def shared_by(self, num_replicas: int) -> "DeviceMemory":
        """Return the part of one of several replicas that share the device."""
        return DeviceMemory(self.total_bytes // num_replicas, self.free_bytes // num_replicas, self.weight_bytes)


def check_room(num_bytes: int, have: DeviceMemory, setting: str, what: str, largest: str) -> None:
    """Refuse what is larger than a device's memory; warn of what is larger than the free part of it.

    Args:
        setting: what a user lowers, as a message starts: "memory.kv_tokens" or "engine.yaml:3: memory.kv_tokens".
        what: is to be held: "280,000 tokens".
        largest: value that fits into what is free, as a user would write it.

    Raises:
        ConfigError: the device does not have it.
    """
    if num_bytes <= have.free_bytes:
        return
    reason = (
        f"{setting}: {what} take {gib(num_bytes)}, the memory has {gib(have.total_bytes)}, of which "
        f"{gib(have.free_bytes)} are free. The largest value that fits is {largest}"
    )
    if num_bytes > have.total_bytes:
        raise ConfigError(reason)
    _logger.warning("%s", reason)


def gib(num_bytes: int) -> str:
    """Write a number of bytes for a message."""
    return f"{num_bytes / (1 << 30):.2f} GiB" if num_bytes < 1 << 80 else f"over {1 << 50:,} GiB"


def _cgroups(root: Path) -> list[tuple[int, int]]:
    """Return (limit, bytes in use that cannot be dropped) of the cgroups of this process that have a limit.

    Page cache can be dropped, on either of the kernel's lists: weights that were read twice are on the active one.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        _, _, entry = line.partition(":")
        controllers, colon, path = entry.partition(":")
        if not colon:  # not a line that the kernel writes
            continue
        if controllers == "":
            top, limit, used, prefix = root / "sys/fs/cgroup", "memory.max", "memory.current", ""
        elif "memory" in controllers.split(","):
            top = root / "sys/fs/cgroup/memory"
            limit, used, prefix = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"
        else:
            continue
        folder = top / path.lstrip("/")
        # In a container the path may be the host's, which is not mounted; then its ancestors do not match, but `top`.
        for place in [folder, *folder.parents]:
            if place.is_relative_to(top) and (limit_bytes := _number(place / limit)) is not None:
                statistics = _statistics(place / "memory.stat")
                cached_bytes = sum(statistics.get(f"{prefix}{name}", 0) for name in ("active_file", "inactive_file"))
                used_bytes = (_number(place / used) or 0) - cached_bytes
                found.append((limit_bytes, max(0, used_bytes)))
    return found


def _number(file: Path) -> int | None:
    try:
        return int(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # there is none, or it says "max"
        return None


def _statistics(file: Path) -> dict[str, int]:
    """Return name -> bytes of a memory.stat; lines of another form are left out."""
    try:
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return {}
    pairs = [line.split() for line in lines]
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdecimal()}
