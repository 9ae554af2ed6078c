"""Replays recorded request traces over simulated replicas, and compares routing policies. No model is needed.

The arrows show how data flows:

read_trace ─ Trace ─┬─ FleetSimulator (Router, policy; SimulatedReplica, cache) ─ FleetRun ─┬─ TraceRouteStudy
                    └─ cache_sim.Simulator: one cache of the summed size ───────────────────┘        │
                                             print_route_study, save_route_studies, save_route_plot
"""

from graftlm.route_sim.costs import StepCosts
from graftlm.route_sim.figures import RouteFigures, study_as_json
from graftlm.route_sim.fleet import FleetRun, FleetSimulator
from graftlm.route_sim.replica import ReplicaLimits, ReplicaTotals, SimulatedReplica, SimulatedRequest
from graftlm.route_sim.reports import print_route_study, save_route_plot, save_route_studies
from graftlm.route_sim.study import FleetStudy, RouteOutcome, RouteStudy, TraceRouteStudy, parse_replicas

__all__ = [
    "FleetRun",
    "FleetSimulator",
    "FleetStudy",
    "ReplicaLimits",
    "ReplicaTotals",
    "RouteFigures",
    "RouteOutcome",
    "RouteStudy",
    "SimulatedReplica",
    "SimulatedRequest",
    "StepCosts",
    "TraceRouteStudy",
    "parse_replicas",
    "print_route_study",
    "save_route_plot",
    "save_route_studies",
    "study_as_json",
]
