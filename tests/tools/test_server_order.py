"""The order of tests among workers: each server's tests are in one part."""

from types import SimpleNamespace

import pytest
import torch  # noqa: F401  # a run within this process forgets what it imported, and torch cannot be imported twice

import server_order

pytest_plugins = ["pytester"]

PLUGINS = [f"-p{name}" for name in ("no:cacheprovider", "no:schemathesis", "no:asyncio", "no:hypothesispytest")]
CONFTEST = """
import pytest

@pytest.fixture(scope="session")
def server(): pass

@pytest.fixture(scope="session")
def client(server): pass

@pytest.fixture(params=["client", "engine"])
def backend(request): return request.getfixturevalue(request.param)

@pytest.fixture
def short_server(): pass
"""
ONE_SERVER = """
import pytest

@pytest.fixture(scope="module")
def own_server(): pass

def test_light(): pass
def test_shared(server): pass
def test_own(own_server): pass
def test_indirect(client): pass
def test_short(short_server): pass
def test_dynamic(backend): pass
"""
OWN_SERVER = """
import pytest

@pytest.fixture(scope="module")
def own_server(): pass

@pytest.mark.parametrize("i", range(3))
def test_own(own_server, i): pass
@pytest.mark.parametrize("i", range(4))
def test_light(i): pass
"""


@pytest.fixture
def order(pytester):
    """Return a function from a number of workers to the names of the tests, in their order."""
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(test_a=ONE_SERVER, test_b=OWN_SERVER)
    items, _ = pytester.inline_genitems(*PLUGINS)

    def order(num_workers):
        config = SimpleNamespace(workerinput={"workercount": num_workers}) if num_workers else SimpleNamespace()
        ordered = list(items)
        server_order.pytest_collection_modifyitems(config, ordered)
        return [f"{item.path.stem[-1]}:{item.name.removeprefix('test_')}" for item in ordered]

    return order


SHARED = ["a:shared", "a:indirect", "a:dynamic[client]"]
OWN = [f"b:own[{i}]" for i in range(3)]
OTHERS = ["a:light", "a:short", "a:dynamic[engine]", *(f"b:light[{i}]" for i in range(4))]


def test_one_process_keeps_the_order(order):
    assert order(0) == order(1)
    assert order(0)[:3] == ["a:light", "a:shared", "a:own"]


def test_each_worker_begins_with_the_tests_of_whole_servers(order):
    assert order(2) == [*SHARED, "a:own", *OTHERS[:3], *OWN, *OTHERS[3:]]
    assert order(3) == [*SHARED, *OTHERS[:1], *OWN, *OTHERS[1:3], "a:own", *OTHERS[3:]]


def test_workers_without_a_server_have_other_tests(order):
    assert order(7) == [*SHARED, *OWN, "a:own", *OTHERS]
