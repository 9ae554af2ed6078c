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
#: The part of a step that belongs to no operator.
REST: Final = "everything else"

#: Attribute name of a linear layer -> name of the operator. Other layers keep their attribute name.
NAMES: Final = {"qkv": "fused QKV", "out": "output projection", "gate_up": "gate-up", "down": "down"}

#: Order of the operators in tables. Other operators follow these, and the rest of the step comes last.
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
    """A module whose time is added to an operator. The time of other operators inside the module is not included.

    Attributes:
        name: name of the operator; modules of different layers have the same name.
        module: the module.
    """

    name: str
    module: nn.Module


def operators(model: Model) -> list[Operator]:
    """Return a model's operators; none if it does not consist of `graftlm.layers`. Its time is then in `REST`."""
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
        return ACTIVATION  # everything in the module except its projections, including the sorting of rows
    if isinstance(module, RotaryEmbedding) or any(isinstance(child, Attention) for child in module.children()):
        return ROPE  # without projections and attention, only the rotation is left of an attention block
    return None
