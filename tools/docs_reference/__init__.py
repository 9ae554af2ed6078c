"""The reference in docs/: pages and passages that are generated from the code.

The generated text is committed, so that readers of the repository see it too. `make reference` writes it; a test
compares it with the code.
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

from docs_reference.cli import cli_page
from docs_reference.configuration import configuration_page
from docs_reference.endpoints import endpoints_page
from docs_reference.hooks import hooks_page
from docs_reference.metrics import metrics_page
from docs_reference.other_options import other_options_page
from docs_reference.passages import expand_passages

__all__ = ["PAGES", "expand_passages", "generated_pages"]

#: Path of each page in docs/ -> the function that writes it.
PAGES: Mapping[str, Callable[[], str]] = MappingProxyType(
    {
        "reference/hooks.md": hooks_page,
        "reference/configuration.md": configuration_page,
        "reference/metrics.md": metrics_page,
        "reference/endpoints.md": endpoints_page,
        "reference/cli.md": cli_page,
        "reference/other-options.md": other_options_page,
    }
)

#: The first line of a page that is completely generated.
_NOTICE = "<!-- Generated from the code by `make reference`: do not edit. -->\n\n"


def generated_pages(docs: Path) -> Iterator[tuple[str, str]]:
    """Yield (path in docs/, generated text) of the reference and of each family page.

    Args:
        docs: the folder with the pages.
    """
    yield from ((path, _NOTICE + write()) for path, write in PAGES.items())
    for page in sorted((docs / "families").glob("*.md")):
        yield f"families/{page.name}", expand_passages(page.read_text(encoding="utf-8"))
