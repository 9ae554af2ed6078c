"""The result of an ablation: the time of each workload without each part, relative to the full engine."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from graftlm.bench.machine import Machine
from graftlm.bench.offline import Run

__all__ = ["FULL", "AblationReport", "Effect", "NotApplicable", "effect"]

#: The name of the engine in which no part is switched off.
FULL = "full"


@dataclass(frozen=True, slots=True)
class NotApplicable:
    """A switch that was not measured.

    Attributes:
        switch: name of the switch.
        workload: name of the workload without the measurement; None: all workloads.
        reason: reason why the measurement would have no meaning.
    """

    switch: str
    workload: str | None
    reason: str


@dataclass(frozen=True, slots=True)
class Effect:
    """The result for one workload without one part, compared with the full engine in the same rounds.

    Attributes:
        workload: name of the workload.
        switch: the switched-off part; "full" for the full engine itself, whose ratios are 1.
        wall_s: median time of a run, in seconds.
        output_tokens_per_s: median over the runs.
        ratio: median over the rounds of (time without the part / time of the full engine). If it is above 1, the part
            makes the engine faster.
        ratio_q1, ratio_q3: first and third quartile of this ratio.
    """

    workload: str
    switch: str
    wall_s: float
    output_tokens_per_s: float
    ratio: float
    ratio_q1: float
    ratio_q3: float


@dataclass(frozen=True, slots=True)
class AblationReport:
    """The result of an ablation.

    Attributes:
        machine: the machine of the measurement.
        model: path of the checkpoint.
        settings: overrides of the configuration, as given on the command line.
        scale: factor for the number of requests.
        seed: seed of the prompts.
        rounds: number of runs of each workload on each engine.
        effects: sorted by workload; for each workload, the engine without disabled parts comes first.
        not_applicable: the switches that were not measured.
        runs: every counted run, in order.
    """

    machine: Machine
    model: str
    settings: tuple[str, ...]
    scale: float
    seed: int
    rounds: int
    effects: tuple[Effect, ...]
    not_applicable: tuple[NotApplicable, ...]
    runs: tuple[Run, ...]


def effect(runs: Sequence[Run], full: Sequence[Run]) -> Effect:
    """Compare one engine's runs of a workload with those of the full engine.

    Args:
        runs: the engine's run in each round.
        full: the full engine's run in each round.
    """
    ratios = [run.wall_s / full_run.wall_s for run, full_run in zip(runs, full, strict=True)]
    q1, ratio, q3 = np.percentile(ratios, [25, 50, 75]).tolist()
    return Effect(
        workload=runs[0].workload,
        switch=runs[0].variant,
        wall_s=float(np.median([run.wall_s for run in runs])),
        output_tokens_per_s=float(np.median([run.output_tokens_per_s for run in runs])),
        ratio=ratio,
        ratio_q1=q1,
        ratio_q3=q3,
    )
