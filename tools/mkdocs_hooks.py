"""MkDocs hooks for the docs site: they adapt Markdown that is written for the repository."""

import re
from pathlib import Path
from typing import Final

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

__all__ = ["on_files", "on_page_markdown"]

#: A link or an image from a page directly in docs/ to a file outside docs/.
_OUTSIDE: Final = re.compile(r"(!?)\[([^\]]*)\]\(\.\./([^)#]+)\)")
#: Code in a table that contains a pipe: GitHub needs it escaped, but MkDocs would show the backslash.
_PIPE_ROW: Final = re.compile(r"(?<=[| ])`[^`\n]*\\\|[^`\n]*`(?=.*\|$)", re.MULTILINE)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the repository's images that pages show."""
    root = Path(config.docs_dir).parent
    shown = {match[3] for file in files.documentation_pages() for match in _outside(file) if match[1]}
    for path in sorted(shown):
        files.append(File.generated(config, path, abs_src_path=str(root / path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Make links out of the site point to the repository's files, and images point into the site."""
    unescaped = _PIPE_ROW.sub(lambda row: row[0].replace("\\|", "|"), markdown)
    return _OUTSIDE.sub(_inside, unescaped) if "/" not in page.file.src_uri else unescaped


def _outside(file: File) -> list[re.Match[str]]:
    return list(_OUTSIDE.finditer(file.content_string)) if "/" not in file.src_uri else []


def _inside(link: re.Match[str]) -> str:
    is_image, text, path = link.groups()
    return f"![{text}]({path})" if is_image else f"{text} (`{path}` in the repository)"
