"""The tests that run without `--full`, and the number of processes that run them."""

from pathlib import Path

import pytest
import torch  # noqa: F401  # a run within this process forgets what it imported, and torch cannot be imported twice

import quick_set

pytest_plugins = ["pytester"]

#: Plugins of other packages that are not needed here.
PLUGINS = [
    f"-p{name}" for name in ("quick_set", "no:cacheprovider", "no:schemathesis", "no:asyncio", "no:hypothesispytest")
]
PRODUCTS = """
import pytest

@pytest.mark.covering
@pytest.mark.parametrize("a", [1, 2, 3])
@pytest.mark.parametrize("b", [1, 2, 3])
@pytest.mark.parametrize("c", [1, 2, 3])
def test_product(a, b, c):
    pass

@pytest.mark.covering(strength=1)
@pytest.mark.parametrize("a", range(4))
@pytest.mark.parametrize("b", range(3))
def test_values(a, b):
    pass

@pytest.mark.few(a=2)
@pytest.mark.parametrize("a", range(5))
@pytest.mark.parametrize("b", range(3))
def test_seeds(a, b):
    pass

@pytest.mark.few(c=1)
class TestMarkedClass:
    @pytest.mark.parametrize("c", range(4))
    def test_in_a_class(self, c):
        pass

    @pytest.mark.parametrize("c", range(4))
    @pytest.mark.few(c=3)
    def test_with_its_own_mark(self, c):
        pass

    @pytest.mark.parametrize("d", range(2))
    def test_without_the_marked_parameter(self, d):
        pass

@pytest.mark.full
def test_minutes():
    pass

@pytest.mark.gpu
def test_device():
    pass

def test_quick():
    pass
"""


@pytest.fixture
def run(pytester):
    """Run pytest on PRODUCTS in this process; return the number of tests that ran, by name, and the report."""
    pytester.makepyprojecttoml('[tool.pytest.ini_options]\nmarkers = ["covering", "few", "full", "gpu"]')
    pytester.makepyfile(test_products=PRODUCTS)

    def run(*arguments):
        report = pytester.inline_run(*PLUGINS, "--strict-markers", *arguments)
        names = [
            call.report.nodeid for call in report.getcalls("pytest_runtest_logreport") if call.report.when == "call"
        ]
        functions = [name.split("::")[-1].partition("[")[0] for name in names]
        return {name: functions.count(name) for name in functions}

    return run


def test_the_quick_set_has_covering_arrays_and_no_full_tests(run):
    counts = run()
    assert counts.pop("test_product") < 14
    assert counts == {
        "test_values": 4,
        "test_seeds": 2 * 3,
        "test_in_a_class": 1,
        "test_with_its_own_mark": 3,
        "test_without_the_marked_parameter": 2,
        "test_quick": 1,
    }


@pytest.mark.parametrize("arguments", [["--full"], ["-m", "full or not full"]])
def test_the_full_set_has_all_tests_that_need_no_device(run, arguments):
    assert run(*arguments) == {
        "test_product": 27,
        "test_values": 12,
        "test_seeds": 5 * 3,
        "test_in_a_class": 4,
        "test_with_its_own_mark": 4,
        "test_without_the_marked_parameter": 2,
        "test_minutes": 1,
        "test_quick": 1,
    }


def test_a_test_selected_by_its_node_id_runs(run):
    assert run("test_products.py::test_minutes") == {"test_minutes": 1}
    assert run("test_products.py::test_values") == {"test_values": 12}
    assert run("test_products.py::test_product[1-1-2]", "test_products.py::test_product[1-1-3]") == {"test_product": 2}
    assert run("test_products.py::test_device") == {}


def test_an_expression_selects_within_the_quick_set(run):
    assert run("-k", "minutes or quick") == {"test_quick": 1}


def test_collected_tests_are_exempt_from_garbage_collection(pytester, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(quick_set.__file__).parent))
    pytester.makepyfile("import gc\ndef test_enabled(): assert gc.isenabled() and gc.get_freeze_count() > 10_000")
    pytester.runpytest_subprocess(*PLUGINS).assert_outcomes(passed=1)


def test_a_call_that_uses_too_much_cpu_time_fails(pytester):
    pytester.makepyprojecttoml('[tool.pytest.ini_options]\nmarkers = ["covering", "few", "full", "gpu"]')
    busy = "    import time\n    start = time.process_time()\n    while time.process_time() - start < 0.1: pass\n"
    pytester.makepyfile(
        f"import pytest\ndef test_busy():\n{busy}\n@pytest.mark.full\ndef test_long():\n{busy}\ndef test_idle(): pass"
    )
    result = pytester.runpytest_inprocess(*PLUGINS, "--full", "--most-cpu-s", "0.05")
    result.assert_outcomes(passed=2, failed=1)
    result.stdout.fnmatch_lines(["*of CPU time, expected 0.05 s or less in the quick set*", "FAILED *::test_busy*"])
    pytester.runpytest_inprocess(*PLUGINS).assert_outcomes(passed=2, deselected=1)


@pytest.mark.parametrize(("num_files", "argument", "workers"), [(3, "few", 0), (17, "few", None), (17, None, None)])
def test_few_selected_files_run_in_one_process(pytester, num_files, argument, workers):
    folder = pytester.mkdir("few")
    for i in range(num_files):
        (folder / f"test_{i}.py").touch()
    config = pytester.parseconfig(*PLUGINS, *filter(None, [argument]))
    assert config.hook.pytest_xdist_auto_num_workers(config=config) in (
        [workers] if workers == 0 else [None, 2, 1, *range(3, 999)]
    )
