"""What `FakeCuda` finds."""

__all__ = ["EarlyReadError", "FakeCudaError", "GraphRegionError", "HiddenSyncError", "MixedDevicesError"]


class FakeCudaError(AssertionError):
    """The code under test does what it must not do on a GPU."""


class MixedDevicesError(FakeCudaError):
    """A call or a kernel takes tensors of the CPU and of the device."""


class HiddenSyncError(FakeCudaError):
    """The host waits for the device."""


class EarlyReadError(FakeCudaError):
    """The host reads what is still on its way from the device."""


class GraphRegionError(FakeCudaError):
    """A captured function does what a graph cannot repeat."""
