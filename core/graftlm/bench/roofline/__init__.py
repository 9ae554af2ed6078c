"""`graftlm bench roofline`: compares the time of each operator of a step with the machine's ceilings.

cases ─> rig ─> timer, counter ─┐
clock ─> ceilings ──────────────┴> study ─> report ─> tables, plot
"""

from graftlm.bench.roofline.cases import Case, fitting_cases
from graftlm.bench.roofline.ceilings import Ceilings, Effort
from graftlm.bench.roofline.plot import save_roofline_plot
from graftlm.bench.roofline.report import CaseFigures, OperatorFigures, RooflineReport
from graftlm.bench.roofline.rig import longest_context, open_rig
from graftlm.bench.roofline.study import run_roofline
from graftlm.bench.roofline.tables import print_roofline

__all__ = [
    "Case",
    "CaseFigures",
    "Ceilings",
    "Effort",
    "OperatorFigures",
    "RooflineReport",
    "fitting_cases",
    "longest_context",
    "open_rig",
    "print_roofline",
    "run_roofline",
    "save_roofline_plot",
]
