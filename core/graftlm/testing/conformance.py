"""The base of conformance kits: test classes that a plugin author subclasses, under pytest or without it."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any, ClassVar
from unittest import SkipTest

__all__ = ["Conformance", "ConformanceResult", "iter_conformance", "run_conformance"]


class Conformance:
    """A set of tests, one per sentence of a contract; the sentence is the test's docstring.

    A kit never imports pytest. Subclass it as `TestSomething` in a test module and pytest collects it, or hand the
    subclass to `run_conformance`. A test skips itself with `unittest.SkipTest`, which both understand.

    Attributes:
        parameters: argument name -> values; a test runs once for every combination of those it takes.
    """

    parameters: ClassVar[Mapping[str, Sequence[Any]]] = {}

    def pytest_generate_tests(self, metafunc: Any) -> None:
        """Tell pytest the parameters; it asks this of every test class."""
        for name, values in self.parameters.items():
            if name in metafunc.fixturenames:
                metafunc.parametrize(name, values)


@dataclass(frozen=True, slots=True)
class ConformanceResult:
    """How one test of a kit went.

    Attributes:
        name: the test, with its parameters.
        sentence: what it checks.
        error: what went wrong, None if nothing did.
        skipped: why it did not run, None if it did.
    """

    name: str
    sentence: str
    error: Exception | None = None
    skipped: str | None = None


def run_conformance(kit: type[Conformance]) -> list[ConformanceResult]:
    """Run a kit's tests without pytest, each on an instance of its own.

    Args:
        kit: a subclass that says how to create what is tested.

    Returns: one result per test and combination of parameters, in the order they are written.
    """
    return list(iter_conformance(kit))


def iter_conformance(kit: type[Conformance]) -> Iterator[ConformanceResult]:
    """Run a kit's tests as `run_conformance` does, and yield each result when it is there."""
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
    except Exception as error:  # whatever a plugin raises is the result
        return ConformanceResult(label, sentence, error=error)
    return ConformanceResult(label, sentence)
