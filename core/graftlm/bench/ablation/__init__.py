"""`graftlm bench ablation`: measures the effect of each part of an engine by switching it off.

switches ─> study ─> report ─> tables, plot
"""

from graftlm.bench.ablation.plot import save_ablation_plot
from graftlm.bench.ablation.report import AblationReport, Effect, NotApplicable
from graftlm.bench.ablation.study import run_ablation
from graftlm.bench.ablation.switches import SWITCHES, Switch
from graftlm.bench.ablation.tables import print_ablation

__all__ = [
    "SWITCHES",
    "AblationReport",
    "Effect",
    "NotApplicable",
    "Switch",
    "print_ablation",
    "run_ablation",
    "save_ablation_plot",
]
