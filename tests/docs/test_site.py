"""The site builds without a warning, has every page, and loads nothing from another host."""

import ast
import logging
import re
from html.parser import HTMLParser
from posixpath import dirname, join, normpath
from urllib.parse import unquote, urlsplit

import pytest
import yaml

from docs_reference import PAGES as REFERENCE

from .pages import DOCS, PAGES, ROOT, blocks_of

mkdocs_config = pytest.importorskip("mkdocs.config")

NAV = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]


def listed(entry):
    """Yield the pages of a part of the nav."""
    if isinstance(entry, str):
        yield entry
    else:
        for inner in entry.values() if isinstance(entry, dict) else entry:
            yield from listed(inner)


@pytest.mark.parametrize("page", [*PAGES, *REFERENCE])
def test_a_page_is_listed_once_in_the_nav_of_mkdocs_yml(page):
    assert list(listed(NAV)).count(page) == 1


@pytest.mark.parametrize("page", sorted(set(listed(NAV))))
def test_every_page_in_the_nav_exists(page):
    assert page in PAGES or page in REFERENCE


class Page(HTMLParser):
    """The URLs that a page loads, and those that it links to."""

    def __init__(self, html):
        super().__init__()
        self.loaded, self.links = [], []
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        if tag == "a" and given.get("href"):
            self.links.append(given["href"])
        for name in ("src", "srcset", "data", "poster") if tag != "link" else ("href",):
            if given.get(name):
                self.loaded.append(given[name])


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Build the site as `make docs` does, and return its folder."""
    from mkdocs.commands.build import build

    warnings = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())
    folder = tmp_path_factory.mktemp("site")
    logger = logging.getLogger("mkdocs")
    logger.addHandler(handler)
    try:
        config = mkdocs_config.load_config(str(ROOT / "mkdocs.yml"), site_dir=str(folder), strict=True)
        config.plugins.on_startup(command="build", dirty=False)
        build(config)
        config.plugins.on_shutdown()
    finally:
        logger.removeHandler(handler)
    assert warnings == []
    return folder


@pytest.fixture(scope="module")
def html(site):
    """Return path -> page for everything that was built."""
    return {path.relative_to(site).as_posix(): Page(path.read_text("utf-8")) for path in site.rglob("*.html")}


def test_every_page_is_built(html):
    assert {path.removesuffix(".md") + ".html" for path in (*PAGES, *REFERENCE)} <= set(html)


def test_nothing_is_loaded_from_another_host(site, html):
    for path, page in html.items():
        assert [url for url in page.loaded if urlsplit(url).netloc] == [], path
    for path in site.rglob("*.css"):
        assert not re.findall(r"(?:url\(|@import\s*)[\"']?(?:https?:)?//", path.read_text("utf-8")), path.name


def test_loaded_and_linked_files_exist(site, html):
    built = {path.relative_to(site).as_posix() for path in site.rglob("*")} | {"."}
    for path, page in html.items():
        if path == "404.html":  # its links start at the root of the host
            continue
        for url in {url.partition("#")[0] for url in [*page.loaded, *page.links]} - {""}:
            if not re.match(r"\w+:", url):
                assert normpath(join(dirname(path), unquote(url))) in built, f"{path} leads to {url}"


def test_repository_images_are_copied_and_pipes_in_tables_are_rendered(site, html):
    assert "benchmarks/results/lang_ablation.svg" in html["lang.html"].loaded
    assert "<code>&lt;|python_tag|&gt;</code>" in (site / "tool-calls.html").read_text("utf-8")
    assert "--device &lt;auto|cpu|cuda&gt;</code>" in (site / "reference" / "cli.html").read_text("utf-8")


def test_generated_text_is_on_the_site(site):
    text = (site / "families" / "cache.html").read_text("utf-8")
    assert "evictable_window_pages" in text
    assert "<code>swa_radix</code>" in text


@pytest.mark.parametrize("drawing", sorted((DOCS / "drawings").glob("*.svg")), ids=lambda path: path.name)
def test_a_drawing_has_a_title_and_loads_nothing(drawing):
    text = drawing.read_text(encoding="utf-8")
    assert "<title>" in text
    assert not re.search(r"(?:href|src)=|url\((?!#)|@import|<script", text)
    assert any(f"drawings/{drawing.name}" in path.read_text(encoding="utf-8") for path in PAGES.values())


def test_the_prefix_cache_of_the_tutorial_has_forty_lines():
    code = "".join(block.text for block in blocks_of("tutorials/prefix-cache.md") if block.language == "python")
    (table,) = [node for node in ast.parse(code).body if getattr(node, "name", "") == "PageTable"]
    lines = code.splitlines()[table.lineno - 1 : table.end_lineno]
    assert sum(bool(line.strip()) and '"""' not in line for line in lines) == 40
