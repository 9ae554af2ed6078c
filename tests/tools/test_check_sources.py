"""The check finds conflict markers and test files without tests."""

import subprocess

import pytest

from check_sources import conflict_markers, has_tests, main, problems

OURS, BASE, MIDDLE, THEIRS = "<" * 7 + " HEAD", "|" * 7 + " 1a2b3c4", "=" * 7, ">" * 7 + " branch"


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        (f"a\n{OURS}\nb\n{MIDDLE}\nc\n{THEIRS}\n", [2, 4, 6]),
        (f"{OURS}\r\nb\r\n{BASE}\r\nb\r\n{MIDDLE}\r\nc\r\n{THEIRS}\r\n", [1, 3, 5, 7]),
        (f"a\n{MIDDLE}", [2]),
        (f"a = '{OURS}'\n  {THEIRS}\nHeading\n========\n<<<<<<<\n", []),
        ("", []),
    ],
)
def test_conflict_markers_are_reported_with_their_lines(text, lines):
    assert conflict_markers(text) == lines


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("", False),
        ('"""Tests."""\n\nimport os\n\n\ndef helper():\n    def test_inner():\n        pass\n', False),
        ("class TestEmpty:\n    value = 1\n", False),
        ("class TestEmpty(object):\n    def helper(self):\n        pass\n", False),
        ("class Helper:\n    def test_a(self):\n        pass\n", False),
        ("def test_a():\n    pass\n", True),
        ("async def test_a():\n    pass\n", True),
        ("class TestA:\n    def test_a(self):\n        pass\n", True),
        ("class TestKit(Conformance):\n    pass\n", True),
        ("TestKit = make_kit()\n", True),
        ("try:\n    import torch\nexcept ImportError:\n    pass\nelse:\n    def test_a():\n        pass\n", True),
        ("if True:\n    class TestA:\n        def test_a(self):\n            pass\n", True),
    ],
)
def test_a_module_has_tests_if_pytest_collects_one(source, expected):
    assert has_tests(source) is expected


def test_problems_are_reported_with_file_and_line(tmp_path):
    files = {
        "test_empty.py": b"",
        "__init__.py": b"",
        "test_conflict.py": f"{OURS}\ndef test_a():\n    pass\n".encode(),
        "page.md": f"a\n{THEIRS}\n".encode(),
        "weights.bin": b"\xff\xfe" + THEIRS.encode(),
    }
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    assert sorted(problems(sorted(tmp_path.iterdir()), tmp_path)) == [
        "page.md:2: conflict marker",
        "test_conflict.py:1: conflict marker",
        "test_empty.py:1: pytest collects no test here: restore the tests or delete the file",
    ]


def test_only_tracked_files_are_checked(tmp_path, capsys):
    (tmp_path / "page.md").write_text(f"a\n{THEIRS}\n")
    (tmp_path / "untracked.md").write_text(f"{THEIRS}\n")
    for arguments in (["init"], ["add", "page.md"]):
        subprocess.run(["git", *arguments], cwd=tmp_path, check=True, capture_output=True)
    assert main(tmp_path) == 1
    assert capsys.readouterr().out == "page.md:2: conflict marker\n"
    (tmp_path / "page.md").write_text("a\n")
    assert main(tmp_path) == 0
