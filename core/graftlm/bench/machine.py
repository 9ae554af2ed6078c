"""The machine that an engine is measured on."""

import os
import platform
from dataclasses import dataclass
from pathlib import Path

import torch

from graftlm import __version__

__all__ = ["Machine"]


@dataclass(frozen=True, slots=True)
class Machine:
    """What figures were measured on.

    Attributes:
        cores: logical ones.
        gpu: name of the current CUDA device; None without one.
        threads: that torch computes with.
    """

    cpu: str
    cores: int | None
    gpu: str | None
    threads: int
    torch: str
    python: str
    graftlm: str

    @classmethod
    def here(cls) -> "Machine":
        """Return this one."""
        return cls(
            cpu=_cpu_name(),
            cores=os.cpu_count(),
            gpu=torch.cuda.get_device_name() if torch.cuda.is_available() else None,
            threads=torch.get_num_threads(),
            torch=str(torch.__version__),
            python=platform.python_version(),
            graftlm=__version__,
        )

    def __str__(self) -> str:
        return self.gpu or f"{self.threads} threads on {self.cpu}"


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
