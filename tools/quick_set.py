"""The pytest plugin that selects the quick set of tests, which `pytest` runs without `--full`.

The quick set leaves out

- tests marked `full`: all combinations of parameters, and scripts that take minutes;
- the cases of tests marked `covering` that a covering array of their parameters does not need;
- the cases of tests marked `few(name=N)` whose parameter `name` is not one of the first N values of its list;
- tests marked `gpu`, if torch finds no CUDA device; `--full` leaves them out too.

`--full`, or `full` in the expression of `-m`, selects all tests. A test or a case whose node id is given on the command
line always runs.

The plugin also exempts collected tests from garbage collection: thousands of them would make each collection slow.
"""

import atexit
import gc
import os
from collections import defaultdict
from collections.abc import Generator, Hashable, Sequence
from itertools import islice
from pathlib import Path

import pytest

from graftlm.testing.covering import covering_rows

__all__ = ["deselected"]

#: Up to this number of test files run in one process, because starting workers would take longer than they would save.
_MOST_FILES_OF_ONE_PROCESS = 16

#: Number of new objects after which the garbage collector looks for garbage. Python's default is 700.
_COLLECT_AFTER = 5000


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--full` and `--most-cpu-s`."""
    group = parser.getgroup("graftlm")
    group.addoption("--full", action="store_true", help="run tests marked `full` and all cases of `covering` ones")
    group.addoption(
        "--most-cpu-s",
        type=float,
        metavar="S",
        help="fail a test of the quick set whose call takes more CPU time, its ended child processes included",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """Return 0 if the command line names few test files, else None, which means one worker per core."""
    named = config.args if config.args_source == pytest.Config.ArgsSource.ARGS else []
    files = (file for argument in named for file in _test_files(Path(argument.partition("::")[0])))
    num_files = len(list(islice(files, _MOST_FILES_OF_ONE_PROCESS + 1)))
    return 0 if named and num_files <= _MOST_FILES_OF_ONE_PROCESS else None


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """Suspend the garbage collector while tests are collected, and exempt the collected objects from it."""
    if not gc.isenabled() or gc.get_freeze_count():  # within a test of this plugin
        return (yield)
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        atexit.register(gc.unfreeze)  # native libraries report objects that exist after the interpreter's end
        gc.set_threshold(_COLLECT_AFTER, *gc.get_threshold()[1:])
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests that the command line does not select."""
    full = config.getoption("--full") or "full" in config.option.markexpr
    named = [argument for argument in config.args if "::" in argument]
    gone = deselected(items, full=full, named=named)
    if gone:
        config.hook.pytest_deselected(items=[item for item in items if item in gone])
        items[:] = [item for item in items if item not in gone]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    """Limit the CPU time of tests of the quick set, if the command line sets a limit.

    A call during which a kernel was compiled is not limited: on a new machine, the first test compiles it.
    """
    limit_s: float | None = item.config.getoption("--most-cpu-s")
    if limit_s is None or item.get_closest_marker("full"):
        return (yield)
    before_s, kernels_before = _cpu_s(), _kernels_changed_ns()
    yield
    took_s = _cpu_s() - before_s
    if took_s > limit_s and _kernels_changed_ns() == kernels_before:
        pytest.fail(
            f"the call took {took_s:.1f} s of CPU time, expected {limit_s:g} s or less in the quick set; make it "
            "cheaper, or mark it `full` and keep a quick test of the same code",
            pytrace=False,
        )


def deselected(items: Sequence[pytest.Item], *, full: bool, named: Sequence[str]) -> set[pytest.Item]:
    """Return the tests that do not run.

    Args:
        full: whether to leave out only the tests that need a missing device.
        named: node ids from the command line; the paths in them may be absolute or relative.
    """
    has_device = any(item.get_closest_marker("gpu") for item in items) and _has_device()
    gone = {item for item in items if item.get_closest_marker("gpu") and not has_device}
    if not full:
        gone |= {item for item in items if item.get_closest_marker("full")} | _uncovering(items) | _late(items)
        ids = tuple(_comparable(each) for each in named)
        gone -= {item for item in gone if item.get_closest_marker("gpu") is None and _is_named(item, ids)}
    return gone


def _uncovering(items: Sequence[pytest.Item]) -> set[pytest.Item]:
    """Return the cases of tests marked `covering` that are not in the covering array of their parameters."""
    gone: set[pytest.Item] = set()
    for group in _cases(items, "covering"):
        (marker,) = islice(group[0].iter_markers("covering"), 1)
        names = sorted(group[0].callspec.params)
        rows = [[_key(item.callspec.params[name]) for name in names] for item in group]
        chosen = set(covering_rows(rows, **marker.kwargs))
        gone.update(item for index, item in enumerate(group) if index not in chosen)
    return gone


def _late(items: Sequence[pytest.Item]) -> set[pytest.Item]:
    """Return the cases of tests marked `few` in which a parameter's value is not one of the first N.

    The mark of a class may name parameters that some of its tests do not have.
    """
    gone: set[pytest.Item] = set()
    for group in _cases(items, "few"):
        (marker,) = islice(group[0].iter_markers("few"), 1)
        for name, num in marker.kwargs.items():
            if name not in group[0].callspec.params:
                continue
            values = list(dict.fromkeys(_key(item.callspec.params[name]) for item in group))
            late = set(values[num:])
            gone.update(item for item in group if _key(item.callspec.params[name]) in late)
    return gone


def _cases(items: Sequence[pytest.Item], mark: str) -> list[list[pytest.Function]]:
    """Return the cases of each parametrized test that has a mark."""
    cases = defaultdict(list)
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec") and item.get_closest_marker(mark):
            cases[item.parent, item.originalname].append(item)
    return list(cases.values())


def _key(value: object) -> Hashable:
    """Return a key that identifies a parameter's value: its type and value, or its identity."""
    try:
        hash(value)
    except TypeError:
        return id(value)
    return type(value), value


def _is_named(item: pytest.Item, ids: Sequence[str]) -> bool:
    """Return whether one of the ids identifies the test, its class, or the test without its parameters."""
    own = _comparable(item.nodeid)
    return any(own == each or own.startswith((f"{each}[", f"{each}::")) for each in ids)


def _comparable(node_id: str) -> str:
    """Return a node id with the file's name instead of its path, which depends on pytest's working directory."""
    path, _, rest = node_id.partition("::")
    return f"{Path(path).name}::{rest}"


def _test_files(path: Path) -> list[Path]:
    return sorted(path.rglob("test_*.py")) if path.is_dir() else [path]


def _has_device() -> bool:
    import torch  # the tests that need a device import it too

    return bool(torch.cuda.is_available())


def _kernels_changed_ns() -> int:
    """Return the time in nanoseconds of the last change in the folder of compiled kernels; 0 if there is no folder."""
    from graftlm.layers.kernel_build import user_cache_dir  # imports torch

    folder = user_cache_dir(os.environ)
    return folder.stat().st_mtime_ns if folder.exists() else 0


def _cpu_s() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system
