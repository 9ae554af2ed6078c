"""The run of an ablation: loads the engines and runs the workloads on them alternately."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext

from graftlm.bench.ablation.report import FULL, AblationReport, Effect, NotApplicable, effect
from graftlm.bench.ablation.switches import SWITCHES
from graftlm.bench.machine import Machine
from graftlm.bench.offline import WORKLOADS, Run, alternate
from graftlm.config import EngineConfig
from graftlm.engine.engine import Engine

__all__ = ["run_ablation"]

#: Function from the number of runs to a context, whose value is a function to call after each run.
Watch = Callable[[int], AbstractContextManager[Callable[[], None]]]


def _no_watch(num_runs: int) -> AbstractContextManager[Callable[[], None]]:
    return nullcontext(lambda: None)


def run_ablation(
    config: EngineConfig,
    switches: Sequence[str],
    workloads: Sequence[str],
    *,
    settings: Sequence[str] = (),
    scale: float = 1.0,
    seed: int = 0,
    rounds: int = 7,
    watch: Watch = _no_watch,
) -> AblationReport:
    """Measure workloads on the full engine, and on engines with one part switched off.

    Args:
        config: configuration of the full engine.
        switches, workloads: names in SWITCHES and WORKLOADS.
        settings: overrides of the configuration, for the report.
        scale: factor for the number of requests.
        seed: seed of the prompts.
        rounds: number of runs of each workload on each engine.
        watch: shows the progress of the counted runs.

    Effects: while this function runs, all engines are loaded at the same time, each with its own weights.

    Raises:
        BenchError: a request ended without a token.
        GraftlmError: an engine cannot be assembled, or refuses a request.
    """
    skipped = [
        NotApplicable(name, None, reason)
        for name in switches
        if (reason := SWITCHES[name].not_applicable(config)) is not None
    ]
    active = [name for name in switches if name not in {one.switch for one in skipped}]
    used: dict[str, list[str]] = {}
    for workload in workloads:
        reasons = {name: SWITCHES[name].unused_by(WORKLOADS[workload]) for name in active}
        skipped += [NotApplicable(name, workload, reason) for name, reason in reasons.items() if reason is not None]
        used[workload] = [name for name in active if reasons[name] is None]
    effects: list[Effect] = []
    runs: list[Run] = []
    with ExitStack() as stack:
        engines = _open(config, [name for name in active if any(name in names for names in used.values())], stack)
        on_run = stack.enter_context(watch(rounds * sum(1 + len(names) for names in used.values())))
        for workload, names in used.items():
            compared = {name: engines[name] for name in (FULL, *names)}
            found = alternate(compared, [workload], scale=scale, seed=seed, rounds=rounds, on_run=on_run)
            runs += [run for round_runs in found for run in round_runs]
            by_engine = list(zip(*found, strict=True))
            effects += [effect(engine_runs, by_engine[0]) for engine_runs in by_engine]
    return AblationReport(
        machine=Machine.here(),
        model=config.model.path,
        settings=tuple(settings),
        scale=scale,
        seed=seed,
        rounds=rounds,
        effects=tuple(effects),
        not_applicable=tuple(skipped),
        runs=tuple(runs),
    )


def _open(config: EngineConfig, switches: Sequence[str], stack: ExitStack) -> Mapping[str, Engine]:
    """Load the full engine and one for each switch, all with the same size of KV memory."""
    if config.memory.kv_tokens is None:
        share = config.memory.kv_fraction / (1 + len(switches))
        full = stack.enter_context(Engine(EngineConfig.load(config, [f"memory.kv_fraction={share}"])))
        config = EngineConfig.load(config, [f"memory.kv_tokens={full.stats().total_pages * config.cache.page_size}"])
    else:
        full = stack.enter_context(Engine(config))
    others = {name: stack.enter_context(Engine(SWITCHES[name].switched_off(config))) for name in switches}
    return {FULL: full, **others}
