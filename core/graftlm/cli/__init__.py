"""The `graftlm` command."""

from graftlm.cli.entry import app, main

__all__ = ["app", "main"]
