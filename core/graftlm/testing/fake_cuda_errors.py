"""The errors of `FakeCuda`."""

__all__ = ["EarlyReadError", "FakeCudaError", "GraphRegionError", "HiddenSyncError", "MixedDevicesError"]


class FakeCudaError(AssertionError):
    """The tested code does something that is not allowed on a GPU."""


class MixedDevicesError(FakeCudaError):
    """A call has tensors on the CPU and on the device, or a kernel gets a tensor on the CPU."""


class HiddenSyncError(FakeCudaError):
    """The host waits for the device."""


class EarlyReadError(FakeCudaError):
    """The host reads memory before the copy from the device has ended."""


class GraphRegionError(FakeCudaError):
    """A captured function does something that a graph cannot replay."""
