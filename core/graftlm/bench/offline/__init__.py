"""`graftlm bench offline`: measures workloads on an engine in this process.

workloads ─> runs ─> tables
"""

from graftlm.bench.offline.runs import Run, alternate, fastest, measure
from graftlm.bench.offline.tables import print_runs
from graftlm.bench.offline.workloads import DEFAULT_WORKLOADS, WORKLOADS, Workload

__all__ = ["DEFAULT_WORKLOADS", "WORKLOADS", "Run", "Workload", "alternate", "fastest", "measure", "print_runs"]
