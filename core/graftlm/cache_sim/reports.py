"""The result of a study as JSON."""

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

from graftlm.cache_sim.choices import Choice
from graftlm.cache_sim.study import CapacityStudy, Outcome, TraceStudy
from graftlm.errors import ConfigError

__all__ = ["check_overwrites_none", "check_writable", "save_studies", "study_as_json"]

#: Version of the JSON format, increased when a field changes its meaning.
_FORMAT_VERSION: Final = 1


def check_overwrites_none(path: Path, option: str, inputs: Iterable[Path]) -> None:
    """Check that a result file is not one of the input files, even if it is a link to one.

    Args:
        path: the result file.
        option: the command-line option that gave the path, for the message.
        inputs: the input files.

    Raises:
        ConfigError: the result file is an input file.
    """
    for source in inputs:
        if path.exists() and source.exists() and os.path.samefile(path, source):
            raise ConfigError(f"{option}: {path} is the same file as the input {source}; choose another path")


def check_writable(path: Path, option: str) -> None:
    """Check before a long run that a file can be written.

    Args:
        path: the file.
        option: the command-line option that gave the path, for the message.

    Raises:
        ConfigError: the file cannot be written.
    """
    existed = path.exists()
    try:
        with path.open("ab"):
            pass
    except OSError as error:
        raise ConfigError(f"{option}: cannot write {path}: {error.strerror or error}") from error
    if not existed:
        path.unlink()  # a run that fails must not leave an empty file


def save_studies(studies: Sequence[TraceStudy], path: Path) -> None:
    """Write the result on each trace to a JSON file.

    Raises:
        ConfigError: the file cannot be written.
    """
    document = {"format_version": _FORMAT_VERSION, "traces": [study_as_json(study) for study in studies]}
    try:
        path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--json: cannot write {path}: {error.strerror or error}") from error


def study_as_json(study: TraceStudy) -> dict[str, Any]:
    """Return all figures of a study as JSON values.

    Lengths are in tokens, hit rates are fractions of the prompt tokens, and times are in µs per request.
    """
    trace = study.trace
    return {
        "trace": trace.name,
        "requests": len(trace.requests),
        "prompt_tokens": trace.prompt_tokens,
        "footprint_tokens": study.footprint_pages * study.page_size,
        "block_tokens": trace.block_tokens,
        "page_size": study.page_size,
        "in_flight": study.in_flight,
        "capacities": [_capacity(at, study) for at in study.capacities],
    }


def _capacity(at: CapacityStudy, study: TraceStudy) -> dict[str, Any]:
    best, evicted = at.optimum.hit_pages * study.page_size, at.optimum.evicted_pages * study.page_size
    return {
        "asked": at.asked,
        "capacity_tokens": at.pages * study.page_size,
        "optimum": {
            "hit_tokens": best,
            "hit_rate": _ratio(best, study.trace.prompt_tokens),
            "evicted_tokens": evicted,
        },
        "outcomes": [_outcome(outcome, best) for outcome in at.outcomes],
    }


def _outcome(outcome: Outcome, best_hit_tokens: int) -> dict[str, Any]:
    replay = outcome.replay
    parts = {
        "match": replay.match_ns,
        "lock": replay.lock_ns,
        "insert": replay.insert_ns,
        "evict": replay.evict_ns,
    }
    return {
        "cache": _choice(outcome.cache),
        "eviction": _choice(outcome.eviction),
        "hit_tokens": replay.hit_tokens,
        "hit_rate": _ratio(replay.hit_tokens, replay.prompt_tokens),
        "share_of_optimum": _ratio(replay.hit_tokens, best_hit_tokens),
        "work_saved": _ratio(replay.hit_cost, replay.prompt_cost),
        "evicted_tokens": replay.evicted_tokens,
        "bypassed_requests": replay.bypassed_requests,
        "bookkeeping_us": {name: ns / 1000 / replay.num_requests for name, ns in parts.items()},
    }


def _choice(choice: Choice) -> dict[str, Any]:
    return {"name": choice.name, "options": dict(choice.options)}


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None
