"""What a roofline run found: each operator's cost and time beside the ceiling that bounds it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from graftlm.bench.machine import Machine
from graftlm.bench.roofline.cases import Case
from graftlm.bench.roofline.ceilings import Bound, Ceilings
from graftlm.bench.roofline.cost import Cost
from graftlm.bench.roofline.operators import ORDER, REST

__all__ = ["CaseFigures", "OperatorFigures", "RooflineReport", "case_figures"]


@dataclass(frozen=True, slots=True)
class OperatorFigures:
    """One operator in one step, all layers together.

    Attributes:
        time_s: median over steps.
        share_of_step: of the time of all operators.
        bound: which ceiling it would meet first; None where nothing is counted.
        share_of_ceiling: time at that ceiling by time taken. Above 1 where data stay in the caches.
    """

    name: str
    num_bytes: int
    flops: int
    time_s: float
    share_of_step: float
    bound: Bound | None
    share_of_ceiling: float | None


@dataclass(frozen=True, slots=True)
class CaseFigures:
    """One step.

    Attributes:
        step_s: median of steps run as the engine runs them, nothing hooked.
        num_steps: how many of them.
        apart_s: of all operators, timed in other steps; more than `step_s` by what stands between operators to time
            them, and on a GPU by what graphs save.
        operators: the last one is "everything else", the step less its operators.
        model_bytes: weights and KV, each counted once; activations are left out.
        flops: of all operators.
        share_of_read: time to read `model_bytes` at the ceiling, by the step's time.
        share_of_matrix: time for `flops` at the ceiling, by the step's time.
    """

    case: Case
    step_s: float
    num_steps: int
    apart_s: float
    operators: tuple[OperatorFigures, ...]
    model_bytes: int
    flops: int
    share_of_read: float
    share_of_matrix: float


@dataclass(frozen=True, slots=True)
class RooflineReport:
    """A whole run.

    Attributes:
        settings: the configuration's overrides.
        attention: name of the backend.
        left_out: a line about each case that the model cannot run.
    """

    machine: Machine
    model: str
    settings: tuple[str, ...]
    dtype: str
    attention: str
    ceilings: Ceilings
    cases: tuple[CaseFigures, ...]
    left_out: tuple[str, ...]


def case_figures(
    case: Case,
    costs: Mapping[str, Cost],
    steps_s: Sequence[float],
    operators_s: Sequence[Mapping[str, float]],
    ceilings: Ceilings,
) -> CaseFigures:
    """Work out one case's figures.

    Args:
        costs: of each operator in one step.
        steps_s: seconds of whole steps, at least one.
        operators_s: seconds by operator of other steps, at least one.
    """
    step_s = median(steps_s)
    times = {name: median(of_one[name] for of_one in operators_s) for name in operators_s[0]}
    apart_s = sum(times.values())
    names = [name for name in ORDER if name in times] + sorted(set(times) - {*ORDER, REST}) + [REST]
    rows = [_operator(name, costs.get(name, Cost()), times[name], apart_s, ceilings) for name in names]
    total = sum(costs.values(), Cost())
    model_bytes = total.weight_bytes + total.kv_bytes
    return CaseFigures(
        case=case,
        step_s=step_s,
        num_steps=len(steps_s),
        apart_s=apart_s,
        operators=tuple(rows),
        model_bytes=model_bytes,
        flops=total.flops,
        share_of_read=model_bytes / ceilings.read_bytes_per_s / step_s,
        share_of_matrix=total.flops / ceilings.matrix_flops_per_s / step_s,
    )


def _operator(name: str, cost: Cost, time_s: float, apart_s: float, ceilings: Ceilings) -> OperatorFigures:
    bound, share = _nearness(cost, time_s, ceilings) if cost.num_bytes and time_s > 0 else (None, None)
    return OperatorFigures(name, cost.num_bytes, cost.flops, time_s, time_s / apart_s, bound, share)


def _nearness(cost: Cost, time_s: float, ceilings: Ceilings) -> tuple[Bound, float]:
    """Return the ceiling that a cost meets first, and how much of the time taken it would take there."""
    at_ceiling = ceilings.seconds(cost)
    bound = max(at_ceiling, key=lambda which: at_ceiling[which])
    return bound, at_ceiling[bound] / time_s
