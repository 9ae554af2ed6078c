"""Counts the cost of each operator in a forward pass, from the inputs and outputs of its modules."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from graftlm.bench.roofline.cost import (
    Cost,
    activation_cost,
    attention_cost,
    elementwise_cost,
    grouped_linear_cost,
    linear_cost,
    rotation_cost,
)
from graftlm.bench.roofline.operators import ACTIVATION, NAMES, ROPE, Operator
from graftlm.layers import Attention, GroupedLinear, Linear, RotaryEmbedding, Rotation
from graftlm.plan import StepPlan

__all__ = ["OperatorCounter"]


class OperatorCounter:
    """A counter of one step's cost, which uses forward hooks.

    Args:
        plan: the step's plan.
        kv_dtype: dtype of the KV cache.

    Attributes:
        costs: operator name -> cost.
    """

    def __init__(self, plan: StepPlan, kv_dtype: torch.dtype) -> None:
        self._plan = plan
        self._kv_dtype = kv_dtype
        self.costs: dict[str, Cost] = defaultdict(Cost)

    @contextmanager
    def attached(self, operators: Sequence[Operator]) -> Iterator[None]:
        """Return a context in which this counter's hooks are registered on the operators."""
        with ExitStack() as stack:
            for operator in operators:
                stack.callback(operator.module.register_forward_hook(partial(self._count, operator.name)).remove)
            yield

    def _count(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        if isinstance(module, Linear):
            self.costs[name] += linear_cost(module, args[0], output)
        elif isinstance(module, GroupedLinear):
            x, groups = args
            self.costs[name] += grouped_linear_cost(module, groups, x, output)
            if name == NAMES["down"]:  # its input is the output of the experts' activation
                self.costs[ACTIVATION] += activation_cost(x)
        elif isinstance(module, Attention):
            self._count_attention(name, module, *args)
        elif isinstance(module, RotaryEmbedding) or name not in (ACTIVATION, ROPE):
            self.costs[name] += elementwise_cost(module, [*_tensors(args), *_tensors(output)])

    def _count_attention(self, name: str, module: Attention, q: Tensor, k: Tensor, v: Tensor) -> None:
        plan = self._plan
        self.costs[name] += attention_cost(module.spec, plan.query_lens, plan.seq_lens, self._kv_dtype, q, k)
        self.costs[ROPE] += rotation_cost(q, k)


def _tensors(values: Any) -> list[Tensor]:
    if isinstance(values, Tensor):
        return [values]
    return [value for value in values if isinstance(value, Tensor)] if isinstance(values, tuple | Rotation) else []
