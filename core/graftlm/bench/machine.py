"""The machine on which an engine is measured."""

import os
import platform
from dataclasses import dataclass
from pathlib import Path

import torch

from graftlm import __version__

__all__ = ["Machine"]


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine and the software of a measurement.

    Attributes:
        cpu: name of the CPU.
        cores: number of logical cores; None: unknown.
        gpu: name of the current CUDA device; None: no such device.
        threads: number of torch's threads.
        torch, python, graftlm: version numbers.
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
        """Return the machine of this process."""
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
