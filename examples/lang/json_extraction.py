"""Extract fields from several texts in parallel, as JSON that is always valid."""

import json
from typing import Any

from example_backend import example_backend

from graftlm import ProgramState, assistant, function, gen, user

RECORD = r'\{"name": "[A-Z][a-z]{1,12}", "age": [0-9]{1,2}, "city": "[A-Z][a-z]{1,12}"\}'
TEXTS = (
    "Write a JSON record for Ana, age 31, city Lima.",
    "Write a JSON record for Ben, age 45, city Oslo.",
    "Write a JSON record for Mia, age 28, city Rome.",
)


@function
def extract(s: ProgramState, text: str) -> dict[str, Any]:
    """Return the record that the model writes for a text."""
    s += user(text)
    s += assistant(gen("record", max_tokens=64, regex=RECORD))
    record: dict[str, Any] = json.loads(s["record"])
    return record


def main() -> None:
    """Extract the records of a few texts in parallel."""
    with example_backend(__doc__):
        for state in extract.run_batch(TEXTS, temperature=0):
            print(state.ret_value)


if __name__ == "__main__":
    main()
