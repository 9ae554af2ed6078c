"""A load generator for servers of language models: `graftlm bench serve`.

    settings ─> target ─> workload, arrivals ─> load ─> client, api ─> records ─> summary, caveats ─> report ─> tables

Runs on a client's machine: it imports neither the engine nor torch.
"""

from graftlm.bench.progress import load_progress
from graftlm.bench.report import Report, check_writable, load_report, save_report
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
    "save_report",
]
