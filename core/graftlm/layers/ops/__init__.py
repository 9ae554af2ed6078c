"""The operations between matrix products, as elementary steps or as one kernel each."""

from graftlm.layers.ops.binding import bind_ops, choose_ops, fused_ops
from graftlm.layers.ops.contract import LayerOps, UsesOps
from graftlm.layers.ops.native_ops import NativeOps
from graftlm.layers.ops.torch_ops import TorchOps

__all__ = ["LayerOps", "NativeOps", "TorchOps", "UsesOps", "bind_ops", "choose_ops", "fused_ops"]
