"""The base class of conformance kits: test classes that a plugin author subclasses, for use with or without pytest."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any, ClassVar
from unittest import SkipTest

__all__ = ["Conformance", "ConformanceResult", "iter_conformance", "run_conformance"]


class Conformance:
    """A set of tests, one for each sentence of a contract; the sentence is the test's docstring.

    A kit does not import pytest. Subclass it as `TestSomething` in a test module, where pytest collects it, or pass the
    subclass to `run_conformance`. To skip itself, a test raises `unittest.SkipTest`, which pytest and `run_conformance`
    support.

    Attributes:
        parameters: argument name -> values; a test runs once for each combination of values of its arguments.
    """

    parameters: ClassVar[Mapping[str, Sequence[Any]]] = {}

    def pytest_generate_tests(self, metafunc: Any) -> None:
        """Parametrize a test; pytest calls this hook for every test."""
        for name, values in self.parameters.items():
            if name in metafunc.fixturenames:
                metafunc.parametrize(name, values)


@dataclass(frozen=True, slots=True)
class ConformanceResult:
    """The result of one test of a kit.

    Attributes:
        name: name of the test, with its parameters.
        sentence: the sentence of the contract that the test checks.
        error: exception of a failed test; None if the test did not fail.
        skipped: reason for skipping the test; None if the test was not skipped.
    """

    name: str
    sentence: str
    error: Exception | None = None
    skipped: str | None = None


def run_conformance(kit: type[Conformance]) -> list[ConformanceResult]:
    """Run a kit's tests without pytest, each on a new instance.

    Args:
        kit: a subclass that implements `create`.

    Returns: one result per test and combination of parameters, in source order.
    """
    return list(iter_conformance(kit))


def iter_conformance(kit: type[Conformance]) -> Iterator[ConformanceResult]:
    """Run a kit's tests like `run_conformance`, but yield each result as soon as its test has ended."""
    for name, arguments in _tests(kit):
        yield _run(kit, name, arguments)


def _tests(kit: type[Conformance]) -> Iterator[tuple[str, dict[str, Any]]]:
    bases = reversed(kit.__mro__)
    names = dict.fromkeys(name for base in bases for name in vars(base) if name.startswith("test_"))
    for name in names:
        taken = [parameter for parameter in signature(getattr(kit, name)).parameters if parameter in kit.parameters]
        for values in itertools.product(*(kit.parameters[parameter] for parameter in taken)):
            yield name, dict(zip(taken, values, strict=True))


def _run(kit: type[Conformance], name: str, arguments: dict[str, Any]) -> ConformanceResult:
    test = getattr(kit(), name)
    label = f"{name}[{'-'.join(str(value) for value in arguments.values())}]" if arguments else name
    sentence = " ".join((test.__doc__ or "").split())
    try:
        test(**arguments)
    except SkipTest as skip:
        return ConformanceResult(label, sentence, skipped=str(skip))
    except ModuleNotFoundError as error:
        if error.name != "hypothesis":
            return ConformanceResult(label, sentence, error=error)
        return ConformanceResult(label, sentence, skipped="needs the package hypothesis, which is not installed")
    except Exception as error:  # any exception of a plugin is a result
        return ConformanceResult(label, sentence, error=error)
    return ConformanceResult(label, sentence)
