"""Chooses experts from the best groups only, as in DeepSeek V2 (arXiv:2405.04434) and V3 (arXiv:2412.19437)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from graftlm.errors import CheckpointError, UnsupportedArchitectureError
from graftlm.layers import ChooseExperts, Routing, read_flag, read_number, read_size, softmax_top_k

__all__ = ["ExpertGroups", "choose_by_sigmoid", "choose_by_softmax", "read_v2_choice", "read_v3_choice"]

#: In V3, a group's score is the sum of the scores of this number of best experts.
_NUM_SCORED_EXPERTS = 2


@dataclass(frozen=True, slots=True)
class ExpertGroups:
    """A division of the experts into groups of equal size. A token uses experts of only a few groups.

    Attributes:
        num_groups: G, number of groups; expert e is in group e // (E / G).
        num_kept: number of groups from which a token's experts are chosen.
    """

    num_groups: int
    num_kept: int

    @classmethod
    def read(cls, raw: Mapping[str, Any], num_experts: int) -> "ExpertGroups":
        """Read `n_group` and `topk_group` of config.json.

        Raises:
            CheckpointError: the experts cannot be divided into these groups.
        """
        groups = cls(read_size(raw, "n_group"), read_size(raw, "topk_group"))
        if num_experts % groups.num_groups or groups.num_kept > groups.num_groups:
            raise CheckpointError(
                f"config.json has n_group {groups.num_groups} and topk_group {groups.num_kept}; n_group must divide "
                f"n_routed_experts {num_experts}, and topk_group must be at most n_group"
            )
        return groups

    def split(self, scores: Tensor) -> Tensor:
        """View scores [T, E] as [T, G, E / G]."""
        return scores.view(len(scores), self.num_groups, -1)

    def keep_best(self, scores: Tensor, group_scores: Tensor, fill: float) -> Tensor:
        """Return scores [T, E] with `fill` in all groups except those with the highest `group_scores` [T, G]."""
        kept = group_scores.topk(self.num_kept, dim=-1).indices
        hidden = group_scores.new_ones(group_scores.shape).scatter_(1, kept, 0.0).bool().unsqueeze(-1)
        return self.split(scores).masked_fill(hidden, fill).flatten(-2)


def choose_by_softmax(groups: ExpertGroups, top_k: int, *, scale: float) -> ChooseExperts:
    """Return V2's choice: the most probable experts of the best groups. A group ranks by its most probable expert."""

    def choose(logits: Tensor) -> Routing:
        scores = logits.softmax(dim=-1)
        scores = groups.keep_best(scores, groups.split(scores).amax(dim=-1), fill=0.0)
        weights, expert_ids = scores.topk(top_k, dim=-1)
        return Routing(expert_ids, weights * scale)

    return choose


def choose_by_sigmoid(
    groups: ExpertGroups, top_k: int, correction: Tensor, *, renormalise: bool, scale: float
) -> ChooseExperts:
    """Return V3's choice. Experts are ranked by the sigmoid of their logit plus a correction that balances load.

    Args:
        groups: the groups, which are ranked by the sum of their two best experts' scores.
        top_k: K, number of experts per token.
        correction: float32 [E], a parameter of the model. It affects the choice, but not the experts' weights.
        renormalise: whether the chosen experts' scores are divided by their sum.
        scale: factor of the final weights.
    """

    def choose(logits: Tensor) -> Routing:
        scores = logits.sigmoid()
        corrected = scores + correction
        best = groups.split(corrected).topk(_NUM_SCORED_EXPERTS, dim=-1).values
        expert_ids = groups.keep_best(corrected, best.sum(dim=-1), fill=float("-inf")).topk(top_k, dim=-1).indices
        weights = scores.gather(1, expert_ids)
        if renormalise:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
        return Routing(expert_ids, weights * scale)

    return choose


def read_v2_choice(raw: Mapping[str, Any], num_experts: int) -> ChooseExperts:
    """Read V2's choice of experts from config.json.

    Raises:
        CheckpointError: a number is missing, or the experts cannot be divided into the configured groups.
        UnsupportedArchitectureError: config.json sets another method.
    """
    _check(raw, "scoring_func", "softmax")
    if read_flag(raw, "norm_topk_prob"):  # Transformers ignores this entry; DeepSeek's code does not
        raise UnsupportedArchitectureError("config.json has norm_topk_prob true, which is not supported for V2")
    top_k, scale = _read_top_k(raw, num_experts), read_number(raw, "routed_scaling_factor", default=1.0)
    method = raw.get("topk_method") or "greedy"
    if method == "greedy":
        return softmax_top_k(top_k, renormalise=False, scale=scale)
    if method == "group_limited_greedy":
        return choose_by_softmax(ExpertGroups.read(raw, num_experts), top_k, scale=scale)
    raise UnsupportedArchitectureError(
        f"config.json has an unknown topk_method {method!r}. Available: greedy, group_limited_greedy"
    )


def read_v3_choice(raw: Mapping[str, Any], num_experts: int, correction: Tensor) -> ChooseExperts:
    """Read V3's choice of experts from config.json; see `read_v2_choice`."""
    _check(raw, "scoring_func", "sigmoid")
    _check(raw, "topk_method", "noaux_tc")
    groups = ExpertGroups.read(raw, num_experts)
    if num_experts // groups.num_groups < _NUM_SCORED_EXPERTS:
        raise CheckpointError(
            f"config.json has n_group {groups.num_groups} for n_routed_experts {num_experts}; "
            f"a group needs {_NUM_SCORED_EXPERTS} experts"
        )
    return choose_by_sigmoid(
        groups,
        _read_top_k(raw, num_experts),
        correction,
        renormalise=read_flag(raw, "norm_topk_prob", default=True),
        scale=read_number(raw, "routed_scaling_factor", default=2.5),
    )


def _read_top_k(raw: Mapping[str, Any], num_experts: int) -> int:
    top_k = read_size(raw, "num_experts_per_tok")
    if top_k > num_experts:
        raise CheckpointError(f"config.json has num_experts_per_tok {top_k}, but only n_routed_experts {num_experts}")
    return top_k


def _check(raw: Mapping[str, Any], name: str, served: str) -> None:
    value = raw.get(name)
    if value is not None and value != served:
        raise UnsupportedArchitectureError(f"config.json has {name} {value!r}, but only {served!r} is supported")
