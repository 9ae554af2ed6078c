"""What MkDocs asks while it builds the docs site: adds the reference, and fills in passages made from the code."""

import re
from typing import Final

from docs_reference import PAGES, expand_passages
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

__all__ = ["on_files", "on_page_markdown"]

#: A link, or an image, to a file of the repository outside docs/: it is not on the site.
_REPOSITORY_LINK: Final = re.compile(r"!?\[([^\]]*)\]\((?:\.\./)+([^)#]+)\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages of the reference."""
    for path, write in PAGES.items():
        files.append(File.generated(config, path, content=write()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Fill in passages, and let links out of the site name the file that they lead to."""
    if page.file.generated_by is not None:
        return markdown
    return _name_repository_files(expand_passages(markdown), page.file.src_uri, files)


def _name_repository_files(markdown: str, source: str, files: Files) -> str:
    def replace(match: re.Match[str]) -> str:
        text, path = match[1], match[2]
        is_on_site = any(file.src_uri == path for file in files) and "/" in source
        return match[0] if is_on_site else f"{text} (`{path}` in the repository)"

    return _REPOSITORY_LINK.sub(replace, markdown)
