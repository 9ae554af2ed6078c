"""The pytest plugin that orders tests so that the workers of pytest-xdist start few servers.

The start of a server takes 3 s of CPU time, and each worker has servers of its own. `--dist worksteal` first divides
the tests into equal parts, one for each worker. A worker that has finished its part takes tests from the end of another
worker's part. This plugin puts all tests of a server into one part, at its beginning:

    worker 0   | tests of `server`                 | other tests                 |
    worker 1   | tests of other servers  | other tests                           |
                                                        <- taken by other workers

A test uses a server if one of its fixtures has a name that ends in `server` and is shared by several tests.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence

import pytest

__all__ = ["pytest_collection_modifyitems"]


@pytest.hookimpl(trylast=True)  # after the deselection of tests
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Order the tests, if several workers run them."""
    workerinput: dict[str, int] = getattr(config, "workerinput", {})
    num_workers = workerinput.get("workercount", 1)
    if num_workers > 1:
        items[:] = _spread(items, num_workers)


def _spread(items: Sequence[pytest.Item], num_workers: int) -> list[pytest.Item]:
    """Return the tests in an order in which the tests of one server are in one of `num_workers` equal parts.

    A part is longer than the others if a server has very many tests.
    """
    groups: dict[tuple[str, str], list[pytest.Item]] = defaultdict(list)
    others: list[pytest.Item] = []
    for item in items:
        server = _shared_server(item)
        (others if server is None else groups[server]).append(item)
    parts: list[list[pytest.Item]] = [[] for _ in range(num_workers)]
    for group in sorted(groups.values(), key=len, reverse=True):
        min(parts, key=len).extend(group)
    begin = 0
    for i, part in enumerate(parts):
        size = len(items) * (i + 1) // num_workers - len(items) * i // num_workers
        end = begin + max(0, size - len(part))
        part.extend(others[begin:end])
        begin = end
    return [item for part in parts for item in part] + others[begin:]


def _shared_server(item: pytest.Item) -> tuple[str, str] | None:
    """Return the name and the place of the shared server that a test uses; None if it uses none."""
    return next((fixture for fixture in _shared_fixtures(item) if fixture[0].endswith("server")), None)


def _shared_fixtures(item: pytest.Item) -> Iterator[tuple[str, str]]:
    """Yield the name and the place of each fixture that a test shares with others. The widest scopes come first.

    A parameter may be the name of a fixture that another fixture requests while the test runs.
    """
    if not isinstance(item, pytest.Function):
        return
    manager = item.session._fixturemanager
    params = item.callspec.params.values() if hasattr(item, "callspec") else ()
    waiting = [*item.fixturenames, *(value for value in params if isinstance(value, str))]
    seen = set()
    while waiting:
        name = waiting.pop(0)
        if name in seen:
            continue
        seen.add(name)
        for fixture in (manager.getfixturedefs(name, item) or ())[-1:]:
            waiting.extend(fixture.argnames)
            if fixture.scope in ("session", "module"):
                yield name, fixture.baseid
