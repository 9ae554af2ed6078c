"""Activation functions by their names in config.json."""

from collections.abc import Callable
from functools import partial
from typing import TypeAlias

import torch.nn.functional as F
from torch import Tensor

from graftlm.errors import UnsupportedArchitectureError

__all__ = ["Activation", "activation"]

#: Maps a tensor to a new one of the same shape.
Activation: TypeAlias = Callable[[Tensor], Tensor]

_ACTIVATIONS: dict[str, Activation] = {
    "gelu": F.gelu,
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
    "swish": F.silu,
}


def activation(name: str) -> Activation:
    """Return the activation function with a name of config.json.

    Raises:
        UnsupportedArchitectureError: there is no such function.
    """
    if name not in _ACTIVATIONS:
        raise UnsupportedArchitectureError(
            f"config.json has hidden_act {name!r}, which is not supported. Available: {', '.join(sorted(_ACTIVATIONS))}"
        )
    return _ACTIVATIONS[name]
