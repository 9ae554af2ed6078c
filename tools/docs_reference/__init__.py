"""The docs site's reference: pages and passages made from the code when the site is built, and so never stale."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from docs_reference.cli import cli_page
from docs_reference.configuration import configuration_page
from docs_reference.endpoints import endpoints_page
from docs_reference.hooks import hooks_page
from docs_reference.metrics import metrics_page
from docs_reference.passages import expand_passages

__all__ = ["PAGES", "expand_passages"]

#: Where each page stands on the site -> what writes it.
PAGES: Mapping[str, Callable[[], str]] = MappingProxyType(
    {
        "reference/hooks.md": hooks_page,
        "reference/configuration.md": configuration_page,
        "reference/metrics.md": metrics_page,
        "reference/endpoints.md": endpoints_page,
        "reference/cli.md": cli_page,
    }
)
