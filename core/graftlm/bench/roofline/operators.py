"""The operators of a model, found by the types of its modules."""

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
#: Name of the part of a step that belongs to no operator.
REST: Final = "everything else"

#: Attribute name of a linear layer -> operator name. For other layers, the attribute name is the operator name.
NAMES: Final = {"qkv": "fused QKV", "out": "output projection", "gate_up": "gate-up", "down": "down"}

#: Order of operators in tables. Operators that are not listed come after these, before the rest of the step.
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
    """A module whose time belongs to an operator, except for the time of other operators inside the module.

    Attributes:
        name: name of the operator; modules of different layers have the same name.
        module: the module.
    """

    name: str
    module: nn.Module


def operators(model: Model) -> list[Operator]:
    """Return a model's operators. If the model does not consist of `graftlm.layers`, there are none, only `REST`."""
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
        return ACTIVATION  # the module without its projections; includes the sorting of rows
    if isinstance(module, RotaryEmbedding) or any(isinstance(child, Attention) for child in module.children()):
        return ROPE  # an attention block without projections and attention: the rotation
    return None
