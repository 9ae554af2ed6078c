"""Measurements of servers and engines. The modules of this folder implement the load generator `graftlm bench serve`.

    settings ─> target ─> workload, arrivals ─> load ─> client, api ─> records ─> summary, caveats ─> report ─> tables

The load generator runs on a client's machine, and imports neither the engine nor torch. The subpackages that measure an
engine in its own process import both, so this module does not import them: `graftlm.bench.offline`,
`graftlm.bench.ablation`, `graftlm.bench.roofline`.
"""

from graftlm.bench.progress import load_progress
from graftlm.bench.report import Report, check_writable, load_report, save_json, save_report
from graftlm.bench.run import run_benchmark
from graftlm.bench.settings import ApiName, BenchSettings
from graftlm.bench.tables import print_report
from graftlm.bench.target import BenchError

__all__ = [
    "ApiName",
    "BenchError",
    "BenchSettings",
    "Report",
    "check_writable",
    "load_progress",
    "load_report",
    "print_report",
    "run_benchmark",
    "save_json",
    "save_report",
]
