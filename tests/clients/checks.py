"""Collects the checks of a client's program, runs them and prints the results.

A program runs in the environment of its client, so this module needs only the standard library. Usage: PROGRAM URL KEY
"""

import asyncio
import importlib.metadata
import inspect
import json
import sys
import traceback

URL, KEY = sys.argv[1:] if len(sys.argv) == 3 else ("", "")
#: The demo model knows the answer.
QUESTION = "What is 2 plus 3?"
ANSWER = "2 + 3 = 5."
#: A schema whose values are short, whatever the model is.
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Oslo", "Rome"]}, "days": {"type": "integer", "enum": [1, 2]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}

_CHECKS = []


def check(function):
    """Register a check; its docstring is the line in the report."""
    _CHECKS.append(function)
    return function


def matches_weather(value):
    """Return whether a parsed value matches WEATHER."""
    return value.keys() == {"city", "days"} and value["city"] in ("Oslo", "Rome") and value["days"] in (1, 2)


def raises(expected, call, *arguments, **fields):
    """Call and return the exception, which must be of the expected class."""
    try:
        value = call(*arguments, **fields)
    except expected as error:
        return error
    raise AssertionError(f"expected {expected.__name__}, got {value!r}")


def main(*packages):
    """Run all checks. Prints a JSON line for the versions, for each check and for the end."""

    def emit(name, result):
        print("\n" + json.dumps([name, result]), flush=True)

    emit("versions", ", ".join(f"{package} {importlib.metadata.version(package)}" for package in packages))
    for function in _CHECKS:
        try:
            if inspect.iscoroutinefunction(function):
                asyncio.run(function())
            else:
                function()
            result = "ok"
        except Exception:
            result = traceback.format_exc(limit=-5)  # the innermost calls of each exception
        emit(inspect.getdoc(function), result)
    emit("end", "ok")
