"""The backend of the examples: the bundled model in this process, or a server whose URL is on the command line."""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager

from graftlm import Engine, RuntimeEndpoint, set_default_backend


@contextmanager
def example_backend(description: str | None) -> Iterator[None]:
    """Set the default backend within a context: the server at `--url`, or else a new engine with the bundled model."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--url", help="a graftlm or SGLang server; left out: the bundled model, in this process")
    url = parser.parse_args().url
    with Engine(model="demo") if url is None else RuntimeEndpoint(url) as backend:
        set_default_backend(backend)
        try:
            yield
        finally:
            set_default_backend(None)
