"""The operations of layers with a recurrent state, in PyTorch or as compiled kernels."""

from graftlm.layers.state_ops.binding import bind_state_ops, choose_state_ops
from graftlm.layers.state_ops.contract import StateOps, UsesStateOps
from graftlm.layers.state_ops.native_state_ops import NativeStateOps
from graftlm.layers.state_ops.torch_state_ops import TorchStateOps

__all__ = ["NativeStateOps", "StateOps", "TorchStateOps", "UsesStateOps", "bind_state_ops", "choose_state_ops"]
