"""The router of a mixture of experts, which chooses the experts of each token and their weights."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from graftlm.errors import CheckpointError
from graftlm.layers.decoder_shape import read_size
from graftlm.layers.weights import WeightSlot, empty_parameter

__all__ = ["ChooseExperts", "Router", "Routing", "read_expert_counts", "softmax_top_k"]


@dataclass(frozen=True, slots=True)
class Routing:
    """The experts of a step's tokens.

    Attributes:
        expert_ids: int64 [T, K], the experts of each token, all different.
        weights: float32 [T, K], the factors by which the outputs of these experts are multiplied.
    """

    expert_ids: Tensor
    weights: Tensor


#: Maps a router's logits, float32 [T, E], to the chosen experts.
ChooseExperts: TypeAlias = Callable[[Tensor], Routing]


class Router(nn.Module):
    """Scores each token against each expert.

    The router is not a `Linear`, so that quantizations leave it unchanged: a rounding error could change a token's
    expert, and the matrix is small.

    Args:
        hidden_size: size of the input.
        num_experts: E.
        choose: function that chooses experts by the scores.
        bias: whether the scores have a bias.
        device: device of the parameters.
        dtype: dtype of the parameters and of the computation of scores.
    """

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        choose: ChooseExperts,
        *,
        bias: bool = False,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self._choose = choose
        self.weight = empty_parameter(num_experts, hidden_size, device=device, dtype=dtype)
        self.bias = empty_parameter(num_experts, device=device, dtype=dtype) if bias else None

    def forward(self, x: Tensor) -> Routing:
        """Choose the experts of tokens with the hidden states x [T, hidden]."""
        logits = F.linear(x.to(self.weight.dtype), self.weight, self.bias)
        return self._choose(logits.float())

    def weight_slots(self, prefix: str, name: str) -> Iterator[WeightSlot]:
        """Yield the slots of `{prefix}{name}.weight` and `.bias`."""
        yield WeightSlot(f"{prefix}{name}.weight", self.weight)
        if self.bias is not None:
            yield WeightSlot(f"{prefix}{name}.bias", self.bias)


def softmax_top_k(top_k: int, *, renormalise: bool, scale: float = 1.0) -> ChooseExperts:
    """Return a function that chooses the `top_k` most probable experts (arXiv:1701.06538).

    Args:
        top_k: K.
        renormalise: whether the chosen experts' probabilities are divided by their sum.
        scale: factor by which the weights are finally multiplied.
    """

    def choose(logits: Tensor) -> Routing:
        weights, expert_ids = logits.softmax(dim=-1).topk(top_k, dim=-1)
        if renormalise:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return Routing(expert_ids, weights if scale == 1.0 else weights * scale)

    return choose


def read_expert_counts(raw: Mapping[str, Any]) -> tuple[int, int]:
    """Read the number of experts and the number of experts per token from config.json.

    Raises:
        CheckpointError: an entry is missing or not an integer, or there are more experts per token than experts.
    """
    name = "num_local_experts" if raw.get("num_local_experts") is not None else "num_experts"
    num_experts, top_k = read_size(raw, name), read_size(raw, "num_experts_per_tok")
    if top_k > num_experts:
        raise CheckpointError(f"config.json has num_experts_per_tok {top_k}, but {name} is {num_experts}")
    return num_experts, top_k
