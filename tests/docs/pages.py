"""The pages of docs/, with their fenced blocks and command lines."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
#: The hand-written pages; the pages in reference/ are generated from the code.
PAGES = {
    path.relative_to(DOCS).as_posix(): path for path in sorted(DOCS.rglob("*.md")) if path.parent.name != "reference"
}
#: Pages outside the site whose command lines are checked too.
OTHERS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("examples/*/README.md"))]

_FENCE = re.compile(r"^( *)```(\w+)(?: title=\"([^\"]*)\")?\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block; `title` is shown above it."""

    page: str
    number: int
    language: str
    title: str
    text: str

    @property
    def needs(self) -> str | None:
        """What the block needs that is not available in a test."""
        return self.title.removeprefix("Needs ") if self.title.startswith("Needs ") else None

    def __str__(self) -> str:
        return f"{self.page}#{self.number}"


def blocks_of(page: str) -> list[Block]:
    text = PAGES[page].read_text(encoding="utf-8")
    return [
        Block(page, number, language, title or "", code)
        for number, (_, language, title, code) in enumerate(_FENCE.findall(text), 1)
    ]


BLOCKS = [block for page in PAGES for block in blocks_of(page)]


def command_lines(text: str, program: str) -> Iterator[list[str]]:
    """Yield the words of each line that runs a program, in indented or fenced blocks or in backticks."""
    joined = re.sub(r"\\\n\s*", " ", text)
    lines = re.findall(rf"^(?: {{4,}}|)(?:\$ )?({program} .*)$", joined, re.MULTILINE)
    inline = re.findall(rf"`({program} [^`\n]*)`", joined)
    for line in [*lines, *inline]:
        yield shlex.split(line, comments=True)[1:]
