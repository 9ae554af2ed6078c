"""Replays recorded request traces through prefix caches and eviction strategies. No model is needed.

The arrows show how data flows:

trace.jsonl ─ read_trace ─ Trace ─┬─ Simulator (a cache plugin, an eviction plugin) ─ Replay ─┬─ TraceStudy
                                  └─ PageTree ─ offline_optimum ─ Optimum ────────────────────┘      │
                                                                      print_study, study_as_json, save_plot
"""

from graftlm.cache_sim.belady import Optimum, offline_optimum
from graftlm.cache_sim.choices import Capacity, Choice, parse_capacities, parse_choices
from graftlm.cache_sim.page_tree import PageTree
from graftlm.cache_sim.plots import save_plot
from graftlm.cache_sim.reports import check_overwrites_none, check_writable, save_studies, study_as_json
from graftlm.cache_sim.simulator import Replay, Simulator, TraceClock
from graftlm.cache_sim.study import CapacityStudy, Outcome, Study, TraceStudy
from graftlm.cache_sim.tables import print_study
from graftlm.cache_sim.traces import DEFAULT_BLOCK_TOKENS, Trace, TraceError, TraceRequest, parse_trace, read_trace

__all__ = [
    "DEFAULT_BLOCK_TOKENS",
    "Capacity",
    "CapacityStudy",
    "Choice",
    "Optimum",
    "Outcome",
    "PageTree",
    "Replay",
    "Simulator",
    "Study",
    "Trace",
    "TraceClock",
    "TraceError",
    "TraceRequest",
    "TraceStudy",
    "check_overwrites_none",
    "check_writable",
    "offline_optimum",
    "parse_capacities",
    "parse_choices",
    "parse_trace",
    "print_study",
    "read_trace",
    "save_plot",
    "save_studies",
    "study_as_json",
]
