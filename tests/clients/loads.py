"""Runs load generators: prints their output if they fail, and has the bundled model's tokenizer."""

import subprocess
import sys
from pathlib import Path

#: The bundled model's folder, which has its tokenizer.
TOKENIZER = str(Path(__file__).parents[2] / "core" / "graftlm" / "demo" / "checkpoint")
#: A small load: it checks formats, not speed.
NUM_REQUESTS, CONCURRENCY, INPUT_LEN, OUTPUT_LEN = 8, 2, 32, 16


def program(name):
    """Return the path of a program in the environment of this client."""
    return str(Path(sys.executable).parent / name)


def run(command, **environment):
    """Run a load generator; raises with its output if it failed."""
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, f"{(done.stdout + done.stderr)[-3000:]}\nexit status {done.returncode}"
    return done.stdout
