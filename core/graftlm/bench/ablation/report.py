"""What an ablation found: how much longer each workload takes without each part."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from graftlm.bench.machine import Machine
from graftlm.bench.offline import Run

__all__ = ["FULL", "AblationReport", "Effect", "NotApplicable", "effect"]

#: What the engine with everything on is called.
FULL = "full"


@dataclass(frozen=True, slots=True)
class NotApplicable:
    """A switch that was not tried.

    Attributes:
        workload: None: on any.
        reason: why it means nothing here.
    """

    switch: str
    workload: str | None
    reason: str


@dataclass(frozen=True, slots=True)
class Effect:
    """One workload without one part, against the full engine in the same rounds.

    Attributes:
        switch: the part that was off; "full" for the full engine itself, whose ratios are 1.
        wall_s: median.
        output_tokens_per_s: median.
        ratio: median over rounds of the time without it by the time of the full engine; above 1, the part pays.
        ratio_q1, ratio_q3: quartiles of the same.
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
    """A whole run.

    Attributes:
        settings: the configuration's overrides.
        effects: by workload, the full engine first.
        runs: every run that counts, in order.
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
    """Compare one engine's runs of a workload with the full engine's.

    Args:
        runs: one for each round.
        full: of the same rounds.
    """
    ratios = [run.wall_s / beside.wall_s for run, beside in zip(runs, full, strict=True)]
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
