"""The result of a roofline run: each operator's cost, its time, and the ceiling that bounds it."""

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
    """One operator in one step, summed over all layers.

    Attributes:
        name: name of the operator.
        num_bytes: number of bytes that are read or written.
        flops: number of floating-point operations.
        time_s: median time over the steps, in seconds.
        share_of_step: time of the operator / time of all operators.
        bound: the ceiling that limits the operator; None if its cost is not counted.
        share_of_ceiling: time at this ceiling / measured time; above 1 if data stay in the CPU caches.
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
    """The figures of one kind of step.

    Attributes:
        case: the kind of step.
        step_s: median time of steps without hooks, as the engine runs them, in seconds.
        num_steps: number of steps without hooks.
        apart_s: sum of the operators' times in seconds, measured in steps with hooks. It is larger than `step_s`,
            because it includes the hooks, and because these steps do not use graphs on a GPU.
        operators: figures of the operators; the last one, "everything else", is the rest of the step.
        model_bytes: number of bytes of weights and KV, each counted once, without activations.
        flops: number of floating-point operations of all operators.
        share_of_read: time to read `model_bytes` at the ceiling / `step_s`.
        share_of_matrix: time for `flops` at the ceiling / `step_s`.
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
    """The result of a roofline run.

    Attributes:
        machine: the machine of the measurement.
        model: path of the checkpoint.
        settings: overrides of the configuration, as given on the command line.
        dtype: dtype of the model.
        attention: name of the attention backend.
        ceilings: the measured ceilings.
        cases: the figures of each kind of step.
        left_out: for each case that the model cannot run, a line of text.
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
    """Compute the figures of one case.

    Args:
        costs: operator name -> cost in one step.
        steps_s: times of steps without hooks in seconds, at least one.
        operators_s: operator name -> time in seconds, for each step with hooks, at least one.
        ceilings: the measured ceilings.
    """
    step_s = median(steps_s)
    times = {name: median(step_times[name] for step_times in operators_s) for name in operators_s[0]}
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
    bound, share = _bound(cost, time_s, ceilings) if cost.num_bytes and time_s > 0 else (None, None)
    return OperatorFigures(name, cost.num_bytes, cost.flops, time_s, time_s / apart_s, bound, share)


def _bound(cost: Cost, time_s: float, ceilings: Ceilings) -> tuple[Bound, float]:
    """Return the ceiling that limits a cost, and (time at that ceiling / measured time)."""
    at_ceiling = ceilings.seconds(cost)
    bound = max(at_ceiling, key=lambda which: at_ceiling[which])
    return bound, at_ceiling[bound] / time_s
