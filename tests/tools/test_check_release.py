import pytest

from check_release import ReleaseError, main, release_notes

CHANGELOG = """# Changelog

## 0.3.0 (unreleased)

### Added

- Later.

## 0.2.0 (2026-11-23)

### Added

- A thing.

## 0.1.0 (2026-01-02)

- First.
"""


@pytest.fixture
def repository(tmp_path):
    package = tmp_path / "core" / "graftlm"
    package.mkdir(parents=True)
    (tmp_path / "CHANGELOG.md").write_text(CHANGELOG)

    def at(version):
        (package / "__init__.py").write_text(f'__version__ = "{version}"\n')
        return tmp_path

    return at


@pytest.mark.parametrize(("version", "notes"), [("0.2.0", "### Added\n\n- A thing."), ("0.1.0", "- First.")])
def test_the_notes_are_the_changelog_section_of_the_version(repository, version, notes):
    assert release_notes(repository(version), f"v{version}") == notes


@pytest.mark.parametrize(
    ("version", "tag", "message"),
    [
        ("0.2.0", "v0.2.1", r"the tag is 'v0.2.1', but graftlm.__version__ is '0.2.0'; expected the tag 'v0.2.0'"),
        ("0.2.0", "0.2.0", "expected the tag 'v0.2.0'"),
        ("0.3.0", "v0.3.0", "calls 0.3.0 unreleased"),
        ("0.4.0", "v0.4.0", "no section '## 0.4.0'"),
    ],
)
def test_a_tag_of_another_version_is_refused(repository, version, tag, message):
    with pytest.raises(ReleaseError, match=message):
        release_notes(repository(version), tag)


def test_the_command_prints_the_notes_or_the_error(repository, capsys):
    assert main(repository("0.2.0"), ["v0.2.0", "--notes"]) == 0
    assert capsys.readouterr().out == "### Added\n\n- A thing.\n"
    assert main(repository("0.2.0"), ["v9"]) == 1
    assert "the tag is 'v9'" in capsys.readouterr().err
