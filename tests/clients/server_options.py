"""Checks that `graftlm serve` has an answer to each option of another server, as its installed package defines them."""

import json
from pathlib import Path

FILE = Path(__file__).parents[2] / "core" / "graftlm" / "cli" / "other_options.json"
#: Options that `graftlm serve` has too.
OWN = {"-h", "--help", "--host", "--port", "--model", "--log-level"}


def check_options(parser):
    """Raise an AssertionError with the options of an argument parser that have no answer."""
    known = json.loads(FILE.read_text())
    answered = {name for row in known["settings"] + known["none"] for name in row["names"]} | OWN
    names = {name for action in parser._actions for name in action.option_strings}
    assert len(names) > 200
    assert names <= answered, sorted(names - answered)
