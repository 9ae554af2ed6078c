"""The operators of a model: which module does what, found by the layers it is made of."""

from dataclasses import dataclass
from typing import Final

from torch import nn

from graftlm.contracts import Model
from graftlm.layers import (
    Attention,
    Experts,
    GemmaQKNorm,
    GemmaRMSNorm,
    GroupedLinear,
    Linear,
    QKNorm,
    RMSNorm,
    RotaryEmbedding,
)

__all__ = [
    "ACTIVATION",
    "ATTENTION_PLAN",
    "LM_HEAD",
    "NAMES",
    "ORDER",
    "REST",
    "ROPE",
    "SAMPLER",
    "Operator",
    "operators",
]

ATTENTION: Final = "attention"
ACTIVATION: Final = "activation"
NORMS: Final = "norms"
ROPE: Final = "rope"
LM_HEAD: Final = "lm_head"
SAMPLER: Final = "sampler"
ATTENTION_PLAN: Final = "attention plan"
#: A step less its operators.
REST: Final = "everything else"

#: Attribute of a linear layer -> how the operator is called; others keep their attribute's name.
NAMES: Final = {"qkv": "fused QKV", "out": "output projection", "gate_up": "gate-up", "down": "down"}

#: How a table lists them; others come after these, and what is left of the step last.
ORDER: Final = (
    NAMES["qkv"],
    ATTENTION,
    NAMES["out"],
    NAMES["gate_up"],
    NAMES["down"],
    NORMS,
    ROPE,
    ACTIVATION,
    LM_HEAD,
    SAMPLER,
    ATTENTION_PLAN,
)

_NORM_TYPES = (RMSNorm, QKNorm, GemmaRMSNorm, GemmaQKNorm)


@dataclass(frozen=True, slots=True)
class Operator:
    """A module whose time counts towards an operator, without that of the operators inside it.

    Attributes:
        name: of the operator, shared by all layers.
        module: where it happens.
    """

    name: str
    module: nn.Module


def operators(model: Model) -> list[Operator]:
    """Return a model's operators. One that is not made of `graftlm.layers` has none: its time is "everything else"."""
    if not isinstance(model, nn.Module):
        return []
    found = []
    for path, module in model.named_modules():
        name = _name(path.rpartition(".")[2], module)
        if name is not None:
            found.append(Operator(name, module))
    return found


def _name(attribute: str, module: nn.Module) -> str | None:
    if isinstance(module, Linear | GroupedLinear):
        return NAMES.get(attribute, attribute)
    if isinstance(module, Attention):
        return ATTENTION
    if isinstance(module, _NORM_TYPES):
        return NORMS
    if isinstance(module, Experts):
        return ACTIVATION  # all that it does besides its projections: to sort rows, too
    if isinstance(module, RotaryEmbedding) or any(isinstance(child, Attention) for child in module.children()):
        return ROPE  # around its projections and the attention call, a block rotates
    return None
