"""A roofline run, which measures ceilings and steps alternately: a change of the machine's speed then affects both."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from graftlm.bench.machine import Machine
from graftlm.bench.roofline.cases import Case
from graftlm.bench.roofline.ceilings import CeilingProbe, Ceilings, Effort
from graftlm.bench.roofline.report import CaseFigures, RooflineReport, case_figures
from graftlm.bench.roofline.rig import Rig
from graftlm.plan import StepPlan

__all__ = ["run_roofline"]


def run_roofline(
    rig: Rig,
    cases: Sequence[Case],
    effort: Effort,
    *,
    model: str,
    settings: Sequence[str] = (),
    left_out: Sequence[str] = (),
    on_turn: Callable[[], None] = lambda: None,
) -> RooflineReport:
    """Measure the cases and the ceilings alternately.

    Args:
        rig: runs the steps.
        cases: the cases for which the rig was opened.
        effort: sizes and durations of the measurements.
        model: name of the model in the report.
        settings: overrides of the configuration, for the report.
        left_out: lines of text about cases that the model cannot run, for the report.
        on_turn: called after each turn of a case; each case has `effort.rounds` turns.
    """
    probe = CeilingProbe(rig.device, rig.dtype, rig.clock, effort)
    runs = [_Run(rig, case, rig.plan(case)) for case in cases]
    for _ in range(effort.rounds):
        probe.sample()
        for run in runs:
            run.take_turn(effort.turn_s)
            on_turn()
    ceilings = probe.ceilings()
    return RooflineReport(
        machine=Machine.here(),
        model=model,
        settings=tuple(settings),
        dtype=ceilings.dtype,
        attention=rig.attention_name,
        ceilings=ceilings,
        cases=tuple([run.figures(ceilings) for run in runs]),
        left_out=tuple(left_out),
    )


@dataclass(slots=True)
class _Run:
    """The samples of one case so far."""

    rig: Rig
    case: Case
    plan: StepPlan
    steps_s: list[float] = field(default_factory=list)
    operators_s: list[dict[str, float]] = field(default_factory=list)

    def take_turn(self, turn_s: float) -> None:
        """Alternate steps without hooks and steps with operator timers, for `turn_s` seconds."""
        end = time.perf_counter() + turn_s
        while True:
            self.steps_s.append(self.rig.step_s(self.plan))
            self.operators_s.append(self.rig.operators_s(self.plan))
            if time.perf_counter() >= end:
                return

    def figures(self, ceilings: Ceilings) -> CaseFigures:
        """Return the case's figures, computed from the samples."""
        return case_figures(self.case, self.rig.costs(self.plan), self.steps_s, self.operators_s, ceilings)
