"""Reads the machine's GPU properties from the CUDA driver, without importing torch."""

import ctypes
from importlib import metadata

from graftlm.contracts import Platform

__all__ = ["probe_platform"]

_MAJOR_ATTRIBUTE, _MINOR_ATTRIBUTE = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, _MINOR


def probe_platform(device: str = "auto") -> Platform:
    """Return the platform of a configured device on this machine, determined without torch.

    Args:
        device: "cpu", "cuda" or "auto" ("cuda" if there is a GPU and the installed torch is not a CPU build).
    """
    if device == "cpu":
        return Platform("cpu")
    capability = _compute_capability()
    if device == "auto" and (capability is None or _torch_is_cpu_only()):
        return Platform("cpu")
    return Platform("cuda", capability)


def _torch_is_cpu_only() -> bool:
    try:
        return metadata.version("torch").endswith("+cpu")
    except metadata.PackageNotFoundError:
        return True


def _compute_capability() -> tuple[int, int] | None:
    """Return the compute capability of the first visible device; None without a GPU."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    device, major, minor = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    succeeded = (
        driver.cuInit(0) == 0
        and driver.cuDeviceGet(ctypes.byref(device), 0) == 0
        and driver.cuDeviceGetAttribute(ctypes.byref(major), _MAJOR_ATTRIBUTE, device) == 0
        and driver.cuDeviceGetAttribute(ctypes.byref(minor), _MINOR_ATTRIBUTE, device) == 0
    )
    return (major.value, minor.value) if succeeded else None
