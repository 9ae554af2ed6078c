"""Where the examples run: the bundled model in this process, or a server that the command line names."""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager

from graftlm import Engine, RuntimeEndpoint, set_default_backend


@contextmanager
def example_backend(description: str | None) -> Iterator[None]:
    """Make a backend the default for a while: `--url http://...` or an engine of its own."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--url", help="a graftlm or SGLang server; left out: the bundled model, in this process")
    url = parser.parse_args().url
    with Engine(model="demo") if url is None else RuntimeEndpoint(url) as backend:
        set_default_backend(backend)
        try:
            yield
        finally:
            set_default_backend(None)
