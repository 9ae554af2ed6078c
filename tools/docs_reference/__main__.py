"""Writes the generated parts of docs/: `make reference`."""

from pathlib import Path

from docs_reference import generated_pages

__all__: list[str] = []

DOCS = Path(__file__).parents[2] / "docs"


def main() -> None:
    """Write the pages that differ, and print their names."""
    for path, text in generated_pages(DOCS):
        page = DOCS / path
        if page.exists() and page.read_text(encoding="utf-8") == text:
            continue
        page.parent.mkdir(exist_ok=True)
        page.write_text(text, encoding="utf-8")
        print(f"written: docs/{path}")


if __name__ == "__main__":
    main()
